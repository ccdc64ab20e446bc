/* The C functions of libshoal.a.  Programs use the C++ headers, which wrap them.
 *
 * Only C types cross this interface, so the archive and the program may be built by different compilers and
 * as different versions of C++.  A function that returns shoal_error* returns null if it succeeds; the caller
 * frees the error.  No exception crosses the interface in either direction.
 */
#ifndef SHOAL_ABI_H_
#define SHOAL_ABI_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct shoal_group shoal_group;
typedef struct shoal_operation shoal_operation;
typedef struct shoal_pass shoal_pass;

/* name: that of the exception in shoal::, as in Python.  ranks: see there.  last_completed: -1: none. */
typedef struct shoal_error {
  const char* name;
  const char* message;
  const int32_t* ranks;
  size_t rank_count;
  int64_t last_completed;
} shoal_error;

void shoal_error_free(shoal_error* error);

typedef struct shoal_span {
  void* data;
  uint64_t bytes;
} shoal_span;

typedef struct shoal_spans {
  const shoal_span* data;
  size_t count;
} shoal_spans;

/* The kinds of operations. */
enum {
  SHOAL_ALL_REDUCE = 1,
  SHOAL_REDUCE = 2,
  SHOAL_BROADCAST = 3,
  SHOAL_ALL_GATHER = 4,
  SHOAL_REDUCE_SCATTER = 5,
  SHOAL_GATHER = 6,
  SHOAL_SCATTER = 7,
  SHOAL_ALL_TO_ALL = 8,
  SHOAL_BARRIER = 9,
  SHOAL_SEND = 10,
  SHOAL_RECV = 11,
};

/* A collective.  inputs, outputs: as in the table of src/shoal/spec.py.
 * count: elements, if it must be equal on all ranks.  sizes: bytes of each part, if known on all ranks.
 * timeout: seconds; 0: that of the group. */
typedef struct shoal_call {
  int32_t kind;
  int32_t dtype;
  int32_t op;
  int32_t root;
  uint64_t count;
  shoal_spans inputs;
  shoal_spans outputs;
  const uint64_t* sizes;
  size_t size_count;
  double timeout;
} shoal_call;

/* A message: kind is that of a send or a receive.  peer: -1: any source. */
typedef struct shoal_message {
  int32_t kind;
  int32_t dtype;
  int32_t peer;
  uint64_t tag;
  shoal_span buffer;
  const uint64_t* dims;
  size_t dim_count;
  double timeout;
} shoal_message;

typedef struct shoal_group_info {
  int32_t rank, size, local_rank, local_size;
  const char* name;
  const int32_t* ranks; /* in the first group */
  double timeout;       /* seconds */
} shoal_group_info;

/* -- groups.  options: names and values, alternating. */
shoal_error* shoal_init(const char* const* options, size_t option_count, shoal_group** group);
shoal_group_info shoal_group_describe(const shoal_group* group);
/* 0 open, 1 closing, 2 closed, 3 aborted, 4 broken, 5 forked */
int32_t shoal_group_state(shoal_group* group);
shoal_error* shoal_group_collective(shoal_group* group, const shoal_call* call, shoal_operation** operation);
shoal_error* shoal_group_send_or_receive(shoal_group* group, const shoal_message* message,
                                         shoal_operation** operation);
/* color: null: this rank is in no new group, and *made is null. */
shoal_error* shoal_group_split(shoal_group* group, const int64_t* color, int64_t key, double timeout,
                               shoal_group** made);
/* Shared memory; *owner is for shoal_memory_free. */
shoal_error* shoal_group_allocate(shoal_group* group, uint64_t bytes, void** data, void** owner);
void shoal_memory_free(void* owner);
void shoal_group_abort(shoal_group* group, const char* reason);
/* timeout: seconds; 0: that of the group. */
shoal_error* shoal_group_close(shoal_group* group, double timeout);
void shoal_group_free(shoal_group* group); /* closes it */

/* -- operations */
int32_t shoal_operation_done(shoal_operation* operation);
/* Waits for at most `timeout` seconds; *done: whether the operation is complete.  Returns its error. */
shoal_error* shoal_operation_wait(shoal_operation* operation, double timeout, int32_t* done);
/* Calls `fn(argument)` once, when the operation is complete, in a thread of the archive; at once in this
 * thread if it is complete already. */
void shoal_operation_notify(shoal_operation* operation, void (*fn)(void*), void* argument);
/* Whether the message was withdrawn. */
int32_t shoal_operation_cancel(shoal_operation* operation);
/* Source and number of bytes of a received message. */
void shoal_operation_received(const shoal_operation* operation, int32_t* source, uint64_t* bytes);
/* The key of its future; 0 for messages. */
uint64_t shoal_operation_key(const shoal_operation* operation);
void shoal_operation_free(shoal_operation* operation);

/* -- callbacks */
/* Runs `fn(argument)` in a thread for callbacks, which may block. */
shoal_error* shoal_run(void (*fn)(void*), void* argument);
/* The key of the future of callback `index` of the future `key`. */
uint64_t shoal_then_key(uint64_t key, uint64_t index);
/* Until the matching leave, operations of this thread are matched by keys derived from the callback's.
 * Returns a token for leave. */
void* shoal_callback_enter(uint64_t key, uint64_t index);
void shoal_callback_leave(void* token);

/* -- backward passes: cpp/ddp, where each function is described */
typedef struct shoal_bucket {
  const uint32_t* members;
  const uint64_t* offsets; /* bytes; not read by shoal_pass_* */
  size_t member_count;
  uint64_t bytes;
} shoal_bucket;

/* Assigns gradients to buckets: cpp/ddp/assignment.h.  *buckets is freed by shoal_buckets_free. */
shoal_error* shoal_assign_buckets(const uint64_t* bytes, const uint32_t* kinds, const uint32_t* order,
                                  size_t count, uint64_t first_cap, uint64_t cap, shoal_bucket** buckets,
                                  size_t* bucket_count);
void shoal_buckets_free(shoal_bucket* buckets, size_t count);

/* Used instead of a bucket's index: the outcome of a pass. */
#define SHOAL_OUTCOME ((size_t)-1)

/* The functions of the program that a pass calls: Actions of cpp/ddp/pass.h.  0: the function failed; the
 * program keeps its exception, and the function of the archive that called it returns an error. */
typedef struct shoal_actions {
  void* self;
  int32_t (*fill)(void* self, size_t bucket, int32_t* send);
  int32_t (*send)(void* self, size_t bucket);
  int32_t (*wait)(void* self, size_t bucket);
  int32_t (*deliver)(void* self, const uint8_t* used); /* used: 0 or 1 by parameter */
} shoal_actions;

enum { SHOAL_MARK_IGNORED = 0, SHOAL_MARK_ARRIVED = 1, SHOAL_MARK_PROCEED = 2, SHOAL_MARK_UNEXPECTED = 3 };
enum { SHOAL_END_NOTHING = 0, SHOAL_END_WELL = 1, SHOAL_END_TROUBLE = 2 };
/* Number of elements of a tail, and of the flags before those of the parameters. */
enum { SHOAL_TAIL_ELEMENTS = 3, SHOAL_HEAD_FLAGS = 3 };

typedef struct shoal_pass_state {
  int32_t opened, separate, gaps;
  uint32_t extra;   /* forward passes beyond the first */
  uint64_t arrived; /* number of gradients that have arrived in this pass */
  uint64_t number;  /* number of reduced passes */
} shoal_pass_state;

/* expected: how often each of `count` parameters gets a gradient in a pass. */
shoal_error* shoal_pass_create(int32_t find_unused, int32_t learn, const shoal_bucket* buckets,
                               size_t bucket_count, const uint32_t* expected, size_t count,
                               shoal_pass** pass);
void shoal_pass_free(shoal_pass* pass);
shoal_error* shoal_pass_rebuild(shoal_pass* pass, const shoal_bucket* buckets, size_t bucket_count,
                                const uint32_t* expected);
void shoal_pass_expect(shoal_pass* pass, int32_t counts);
void shoal_pass_ignore(shoal_pass* pass);
void shoal_pass_open(shoal_pass* pass);
/* One of SHOAL_MARK_*.  parameter: less than `count`. */
int32_t shoal_pass_mark(shoal_pass* pass, uint32_t parameter);
shoal_error* shoal_pass_begin(shoal_pass* pass, const shoal_actions* actions, const uint32_t* unreached,
                              size_t unreached_count);
shoal_error* shoal_pass_launch(shoal_pass* pass, const shoal_actions* actions);
/* *end: one of SHOAL_END_*. */
shoal_error* shoal_pass_finish(shoal_pass* pass, const shoal_actions* actions, int32_t interrupted,
                               int32_t* end);
void shoal_pass_close(shoal_pass* pass);
void shoal_pass_tail(const shoal_pass* pass, double tail[SHOAL_TAIL_ELEMENTS]);
shoal_error* shoal_pass_decode_tail(shoal_pass* pass, const double mean[SHOAL_TAIL_ELEMENTS], double epsilon);
/* present: 0 or 1 by parameter.  flags: SHOAL_HEAD_FLAGS + `count` elements. */
shoal_error* shoal_pass_flags(const shoal_pass* pass, const uint8_t* present, uint8_t* flags);
shoal_error* shoal_pass_decode_flags(shoal_pass* pass, const uint8_t* flags);
shoal_pass_state shoal_pass_describe(const shoal_pass* pass);
/* Each writes `count` elements.  *known: whether there is an order to take. */
shoal_error* shoal_pass_take_order(shoal_pass* pass, uint32_t* order, int32_t* known);
void shoal_pass_expected(const shoal_pass* pass, uint32_t* expected);
void shoal_pass_counts(const shoal_pass* pass, uint32_t* counts);
/* missing: room for `count` elements. */
shoal_error* shoal_pass_missing(const shoal_pass* pass, uint32_t* missing, size_t* missing_count);

/* A digest of 32 bytes: BLAKE2b. */
void shoal_digest(const void* data, size_t bytes, unsigned char digest[32]);

#ifdef __cplusplus
}
#endif
#endif /* SHOAL_ABI_H_ */
