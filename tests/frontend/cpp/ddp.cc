// Training with shoal::DistributedDataParallel, for tests/frontend/test_ddp.py:
//
//   ddp train DIR TAG     the steps of tests/frontend/twin.py; writes DIR/TAG-MODE-RANK
//   ddp misuse            what must be refused, on two ranks
//   ddp lost              rank 1 kills itself in a backward pass
//   ddp closed            a group that is closed
#include <shoal/torch.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace nn = torch::nn;
using at::Tensor;

namespace {

// The model of twin.py.
struct NetImpl : nn::Module {
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::Linear spare{nullptr}, last{nullptr};
  NetImpl() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(1, 4, 3)));
    norm = register_module("norm", nn::BatchNorm2d(4));
    spare = register_module("spare", nn::Linear(16, 16));
    last = register_module("last", nn::Linear(16, 3));
    last->bias.set_requires_grad(false);
  }
  Tensor forward(const Tensor& x, bool with_spare) {
    Tensor y = torch::relu(norm(conv(x))).flatten(1);
    if (with_spare) y = y + spare(y);
    return last(y);
  }
};
TORCH_MODULE(Net);
using Model = shoal::DistributedDataParallel<Net>;
static_assert(!std::is_copy_constructible_v<Model> && !std::is_move_constructible_v<Model>);

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<Tensor> tensors_of(nn::Module& module) {
  std::vector<Tensor> all = module.parameters();
  for (const Tensor& buffer : module.buffers()) all.push_back(buffer);
  return all;
}

std::string bytes_of(const std::vector<Tensor>& tensors) {
  std::string bytes;
  for (const Tensor& tensor : tensors) {
    const Tensor dense = tensor.detach().contiguous();
    bytes.append(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
  }
  return bytes;
}

void train(const shoal::Group& group, const std::string& folder, const std::string& tag) {
  const std::string weights = read(folder + "/weights"), inputs = read(folder + "/inputs");
  const auto* input = reinterpret_cast<const float*>(inputs.data());
  for (const std::string mode : {"plain", "unused", "static", "local", "whole"}) {
    Net net;
    // Only rank 0 has the weights: wrapping broadcasts them.
    std::size_t place = 0;
    if (group.rank() == 0) {
      const torch::NoGradGuard no_grad;
      for (Tensor& tensor : net->parameters()) {
        std::memcpy(tensor.mutable_data_ptr(), weights.data() + place, tensor.nbytes());
        place += tensor.nbytes();
      }
    }
    shoal::DistributedDataParallelOptions options;
    options.find_unused_parameters = mode == "unused";
    options.static_graph = mode == "static";
    options.bucket_cap_mb = mode == "whole" ? 25 : 0.0005;
    shoal::DistributedDataParallel model(net, group, options);
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad(step % 2 == 0);
      const auto backward = [&](int part) {
        const std::size_t at =
            static_cast<std::size_t>((step * 2 + part) * group.size() + group.rank()) * 4 * 16;
        const Tensor x = torch::from_blob(const_cast<float*>(input + at), {4, 1, 4, 4});
        const bool with_spare = mode == "unused" ? (step + group.rank()) % 3 == 0 : mode != "static";
        model.forward(x, with_spare).square().mean().backward();
      };
      if (mode == "local") {
        const auto quiet = model.no_sync();
        backward(1);
      }
      backward(0);
      optimizer.step();
    }
    std::ofstream(folder + "/" + tag + "-" + mode + "-" + std::to_string(group.rank()), std::ios::binary)
        << bytes_of(tensors_of(*net));
  }
}

// -- misuse

[[noreturn]] void fail(const std::string& why) { throw std::logic_error(why); }
void expect(bool condition, const std::string& what) {
  if (!condition) fail("expected: " + what);
}

// The message of the exception of class E that `fn` must throw.
template <class E, class F>
std::string message_of(const std::string& what, F fn) {
  try {
    fn();
  } catch (const E& error) {
    std::cout << what << ": " << error.what() << std::endl;
    return error.what();
  }
  fail(what + " was not refused");
}
void contains(const std::string& message, const std::string& part) {
  expect(message.find(part) != std::string::npos, "'" + part + "' in: " + message);
}

struct TwoImpl : nn::Module {  // two layers, of which forward uses some
  nn::Linear a{nullptr}, b{nullptr};
  TwoImpl() {
    torch::manual_seed(1);
    a = register_module("a", nn::Linear(2, 2));
    b = register_module("b", nn::Linear(2, 2));
  }
  Tensor forward(const Tensor& x, bool both = true) { return both ? a(x) + b(x) : a(x); }
};
TORCH_MODULE(Two);

struct ManyImpl : TwoImpl {  // an output of several tensors
  auto forward(const Tensor& x) {
    return std::make_pair(std::vector<Tensor>{a(x)}, std::make_tuple(1, std::optional<Tensor>(b(x))));
  }
};

struct PlacedImpl : nn::Module {
  explicit PlacedImpl(at::Device device) {
    register_parameter("weight", torch::zeros({2, 2}, at::TensorOptions(device)));
  }
};

using Existing = torch::autograd::PostAccumulateGradHook;
struct CountingHook : Existing {
  explicit CountingHook(int& count) : count_(count) {}
  void operator()(const Tensor&) override { ++count_; }
  int& count_;
};

template <class M>
void step(M& model, const shoal::Group& group, bool both = true) {
  model.forward(torch::ones({1, 2}) * (group.rank() + 1), both).sum().backward();
}
// Gradients of the weights are the means over the ranks.
void expect_averages(nn::Linear& layer, const shoal::Group& group) {
  const Tensor mean = torch::full({2, 2}, (group.size() + 1) / 2.0f);
  expect(torch::equal(layer->weight.grad(), mean),
         "an average, not " + std::to_string(layer->weight.grad()[0][0].item<float>()));
}
std::unique_ptr<Existing>& hook_of(const Tensor& tensor) {
  return torch::autograd::impl::post_acc_grad_hooks(tensor);
}

void refuse_different_models(const shoal::Group& group) {
  const auto message = message_of<shoal::ModelMismatch>("mismatch", [&] {
    nn::Sequential net(nn::Linear(2, group.rank() == 1 ? 3 : 2), nn::Linear(2, 2));
    shoal::DistributedDataParallel<nn::Sequential> model(net, group);
  });
  contains(message,
           "rank 1: parameter '0.weight' is float32 [3, 2], requires grad, but float32 [2, 2], requires "
           "grad on rank 0");
  contains(message, "rank 1: parameter '0.bias'");
  shoal::DistributedDataParallelOptions options;
  options.bucket_cap_mb = 0.1 + group.rank();
  contains(message_of<shoal::ModelMismatch>(
               "options", [&] { shoal::DistributedDataParallel<Two> model(Two(), group, options); }),
           "rank 1: option bucket_cap_mb is 1.1, but 0.1 on rank 0");
}

// A problem of rank 1 alone: the others raise ModelMismatch.
template <class F>
void refuse_on_rank_1(const shoal::Group& group, const std::string& what, const std::string& text, F wrap) {
  const std::string message = group.rank() == 1 ? message_of<shoal::UsageError>(what, wrap)
                                                : message_of<shoal::ModelMismatch>(what, wrap);
  contains(message, text);
}

void refuse_models_that_cannot_be_trained(const shoal::Group& group) {
  const bool wrong = group.rank() == 1;
  Two net;
  {
    std::optional<shoal::DistributedDataParallel<Two>> first;
    Two other;
    if (!wrong) net = other;
    first.emplace(other, group);
    refuse_on_rank_1(group, "second wrapper",
                     wrong ? "parameter 'a.weight' belongs to a DistributedDataParallel" : "rank 0",
                     [&] { shoal::DistributedDataParallel<Two> second(wrong ? other : Two(), group); });
    step(*first, group);
    expect_averages(other->a, group);
  }
  shoal::DistributedDataParallel<Two> again(net, group);  // the first is destroyed
  net->zero_grad();
  step(again, group);
  expect_averages(net->a, group);
  refuse_on_rank_1(group, "no values", "meta device", [&] {
    const auto placed = std::make_shared<PlacedImpl>(wrong ? at::kMeta : at::kCPU);
    shoal::DistributedDataParallel<PlacedImpl> model(placed, group);
  });
  refuse_on_rank_1(group, "nothing to train", "nothing to train", [&] {
    Two frozen;
    for (Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(!wrong);
    shoal::DistributedDataParallel<Two> model(frozen, group);
  });
  refuse_on_rank_1(group, "bucket size", "bucket_cap_mb must be positive", [&] {
    shoal::DistributedDataParallelOptions options;
    options.bucket_cap_mb = wrong ? 0 : 25;
    shoal::DistributedDataParallel<Two> model(Two(), group, options);
  });
  contains(message_of<shoal::UsageError>(
               "no module", [&] { shoal::DistributedDataParallel<Two> model(Two(nullptr), group); }),
           "needs a module");
}

void name_unused_parameters(const shoal::Group& group) {
  Two net;
  shoal::DistributedDataParallel<Two> model(net, group);
  const auto unused =
      message_of<shoal::UnusedParameterError>("unused", [&] { step(model, group, group.rank() == 0); });
  contains(unused, "rank 1: 'b.weight', 'b.bias'");
  step(model, group);  // the group is still usable
  net->b->weight.set_requires_grad(false);
  contains(message_of<shoal::UnusedParameterError>("frozen", [&] { step(model, group); }),
           "rank 1: 'b.weight' (frozen after wrapping)");
}

void tell_the_others_of_an_exception_in_backward(const shoal::Group& group) {
  Two net;
  shoal::DistributedDataParallel<Two> model(net, group);
  bool fails = group.rank() == 1;
  net->a->weight.register_hook([&](const Tensor&) {
    if (fails) throw std::runtime_error("by the program");
  });
  if (group.rank() == 1) {
    contains(message_of<std::runtime_error>("own exception", [&] { step(model, group); }), "by the program");
  } else {
    contains(
        message_of<shoal::UnusedParameterError>("exception of another rank", [&] { step(model, group); }),
        "rank 1: an exception ended backward before ");
  }
  fails = false;
  net->zero_grad();
  step(model, group);
  expect_averages(net->a, group);
  expect_averages(net->b, group);
}

void notice_changes_of_the_model(const shoal::Group& group) {
  Two net;
  net->b->bias.set_requires_grad(false);
  shoal::DistributedDataParallel<Two> model(net, group);
  net->b->bias.set_requires_grad(true);
  contains(message_of<shoal::UsageError>("unfrozen", [&] { step(model, group); }),
           "parameter 'b.bias' was frozen when it was wrapped and requires a gradient now");
  net->b->bias.set_requires_grad(false);
  net->to(at::kDouble);
  contains(message_of<shoal::UsageError>("dtype", [&] { step(model, group); }),
           "parameter 'a.weight' was torch.float32 when it was wrapped and is torch.float64 now");
  net->to(at::kFloat);
  step(model, group);
  const nn::Linear old = net->b;
  net->replace_module("b", nn::Linear(2, 2));
  contains(message_of<shoal::UsageError>("replaced", [&] { step(model, group); }),
           "parameter 'b.weight' was replaced");
  net->replace_module("b", old);
  net->register_module("c", nn::Linear(2, 2));
  contains(message_of<shoal::UsageError>("added", [&] { step(model, group); }),
           "parameter 'c.weight' was added");
  net->unregister_module("c");
  step(model, group);
  int count = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(net->a->weight, std::make_unique<CountingHook>(count));
  contains(message_of<shoal::UsageError>("hook", [&] { step(model, group); }),
           "the hook of parameter 'a.weight' on rank " + std::to_string(group.rank()) + " was replaced");
}

void notice_a_skipped_backward_pass(const shoal::Group& group) {
  Two net;
  shoal::DistributedDataParallel<Two> model(net, group);
  if (group.rank() == 1) model.forward(torch::ones({1, 2}));
  contains(message_of<shoal::OutOfStep>("step", [&] { step(model, group); }), "rank 0: 1\n  rank 1: 2");
  net->zero_grad();
  step(model, group);
  expect_averages(net->a, group);
}

void refuse_compiled_autograd(const shoal::Group& group) {
  using namespace torch::dynamo::autograd;
  Two net;
  shoal::DistributedDataParallel<Two> model(net, group);
  AutogradCompilerCall compiler(SizeInput::DynType::STATIC);
  NodeCalls calls;
  const auto node = torch::autograd::impl::grad_accumulator(net->a->weight);
  CompiledNodeArgs arguments(compiler, calls.lookup(node));
  contains(message_of<shoal::UsageError>("compiled autograd",
                                         [&] { hook_of(net->a->weight)->compiled_args(arguments); }),
           "cannot run in compiled autograd");
}

void run_hooks_of_the_program(const shoal::Group& group) {
  int count = 0;
  Two net;
  torch::autograd::impl::set_post_acc_grad_hooks(net->a->weight, std::make_unique<CountingHook>(count));
  const Existing* const own = hook_of(net->a->weight).get();
  Tensor late;
  {
    shoal::DistributedDataParallel<Two> model(net, group);
    step(model, group);
    expect(count == 1, "the program's hook runs");
    expect_averages(net->a, group);
    late = model.forward(torch::ones({1, 2})).sum();
  }
  expect(hook_of(net->a->weight).get() == own, "the program's hook stays");
  expect(hook_of(net->b->weight) == nullptr, "the wrapper's hooks are removed");
  net->zero_grad();
  late.backward();  // local: the wrapper is destroyed
  expect(net->b->weight.grad()[0][0].item<float>() == 1, "a local gradient");
}

void keep_gradients_that_the_program_references(const shoal::Group& group) {
  Two net;
  shoal::DistributedDataParallel<Two> model(net, group);
  step(model, group);
  const Tensor kept = net->a->weight.grad(), part = net->b->weight.grad()[0], copy = kept.clone();
  for (int i = 0; i < 3; ++i) {
    net->zero_grad();
    model.forward(torch::ones({1, 2}) * 7).sum().backward();
    expect(torch::equal(kept, copy) && torch::equal(part, copy[0]), "gradients of the earlier pass");
    expect(net->a->weight.grad()[0][0].item<float>() == 7, "gradients of this pass");
  }
  net->zero_grad(false);
  step(model, group);
  expect_averages(net->a, group);
}

void refuse_sparse_gradients(const shoal::Group& group) {
  const nn::Embedding table(nn::EmbeddingOptions(4, 2).sparse(true));
  shoal::DistributedDataParallel<nn::Embedding> model(table, group);
  contains(
      message_of<shoal::UsageError>(
          "sparse", [&] { model.forward(torch::zeros({1}, at::TensorOptions(at::kLong))).sum().backward(); }),
      "the gradient of 'weight' on rank " + std::to_string(group.rank()) + " is sparse");
}

void find_tensors_in_outputs(const shoal::Group& group) {
  const auto net = std::make_shared<ManyImpl>();
  shoal::DistributedDataParallelOptions options;
  options.find_unused_parameters = true;
  shoal::DistributedDataParallel<ManyImpl> model(net, group, options);
  for (int pass = 0; pass < 3; ++pass) {
    net->zero_grad();
    auto [first, second] = model(torch::ones({1, 2}) * (group.rank() + 1));
    (first[0] + *std::get<1>(second)).sum().backward({}, /*keep_graph=*/false, /*create_graph=*/pass == 2);
    expect_averages(net->a, group);
    expect_averages(net->b, group);
  }
  net->zero_grad();
  {
    const torch::NoGradGuard no_grad;
    if (group.rank() == 0) model(torch::ones({1, 2}));  // evaluation, on one rank
  }
  auto [first, second] = model(torch::ones({1, 2}) * (group.rank() + 1));
  first[0].sum().backward();  // b is reachable, but not used
  expect_averages(net->a, group);
}

void misuse(const shoal::Group& group) {
  refuse_different_models(group);
  refuse_models_that_cannot_be_trained(group);
  name_unused_parameters(group);
  tell_the_others_of_an_exception_in_backward(group);
  notice_changes_of_the_model(group);
  notice_a_skipped_backward_pass(group);
  refuse_compiled_autograd(group);
  run_hooks_of_the_program(group);
  keep_gradients_that_the_program_references(group);
  find_tensors_in_outputs(group);
  refuse_sparse_gradients(group);
}

void lose_a_rank(const shoal::Group& group) {
  Two net;
  shoal::DistributedDataParallel<Two> model(net, group);
  step(model, group);
  group.barrier().wait();
  if (group.rank() == 1) net->a->weight.register_hook([](const Tensor&) { std::raise(SIGKILL); });
  const auto began = std::chrono::steady_clock::now();
  try {
    step(model, group);
  } catch (const shoal::PeerLost& error) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    expect(error.ranks() == std::vector<int>{1}, "the lost rank");
    std::cout << "PeerLost after " << seconds.count() << " s: " << error.what() << std::endl;
    return;
  }
  fail("no PeerLost");
}

void use_a_closed_group(const shoal::Group& group) {
  Two net;
  shoal::DistributedDataParallel<Two> model(net, group);
  step(model, group);
  group.close();
  message_of<shoal::GroupClosed>("backward", [&] { step(model, group); });
  message_of<shoal::GroupClosed>("forward", [&] { step(model, group); });
  message_of<shoal::GroupClosed>("wrapper", [&] { shoal::DistributedDataParallel<Two> other(Two(), group); });
  expect(net->a->weight.grad().numel() == 4, "the memory of a gradient after its group");
}

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  const std::string command = argc > 1 ? argv[1] : "";
  try {
    const shoal::Group group = shoal::init();
    if (command == "train" && argc == 4)
      train(group, argv[2], argv[3]);
    else if (command == "misuse")
      misuse(group);
    else if (command == "lost")
      lose_a_rank(group);
    else if (command == "closed")
      use_a_closed_group(group);
    else
      fail("usage: ddp train DIR TAG | misuse | lost | closed");
  } catch (const std::exception& error) {
    std::cerr << command << ": " << error.what() << std::endl;
    return 1;
  }
  std::cout << command << " done" << std::endl;
  return 0;
}
