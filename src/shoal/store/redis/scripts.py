"""The scripts that a store in Redis runs on its server; each is one atomic step.

A job has two keys, both with ``{shoal:<job>}`` in their names, so that one slot of a cluster has both:

``{shoal:<job>}``          a hash. ``life``: identity of this life of the job; ``k<key>``: the value of a key;
                           ``o<id>``: the write channel's last change: its number, the latest attempt
                           received and, once it is executed, ``=`` and the reply
``{shoal:<job>}:members``  a sorted set: the processes that have the store open, by time of last call

A message on the pub/sub channel ``{shoal:<job>}:<key>`` announces that the key was set.

A reply is a list of a status and, depending on it, a value.
"""

from __future__ import annotations

import hashlib


class Script:
    """A script in Lua; a server that has received ``text`` identifies it by its SHA-1 hash, ``digest``."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.digest = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


#: join MEMBER LIFE MILLISECONDS, keep MEMBER LIFE MILLISECONDS, leave MEMBER LIFE MILLISECONDS CHANNEL...
LIFE = Script("""
local hash, members = KEYS[1], KEYS[2]
local what, member, mine, outliving = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local life = redis.call('HGET', hash, 'life')
if what == 'join' then
    redis.call('PUBLISH', hash .. ':', '')  -- fails without permission, before anything is written
    if not life then
        redis.call('DEL', members)
        redis.call('HSET', hash, 'life', mine)
        life = mine
    end
elseif life ~= mine then
    return {'gone'}
end
if what == 'leave' then
    for i = 5, #ARGV do
        redis.call('HDEL', hash, ARGV[i])
    end
    redis.call('ZREM', members, member)
    if redis.call('ZCOUNT', members, string.format('%.0f', now - outliving), '+inf') == 0 then
        redis.call('DEL', hash, members)
    end
    return {'done', life}
end
redis.call('ZREMRANGEBYSCORE', members, '-inf', string.format('(%.0f', now - outliving))
redis.call('ZADD', members, string.format('%.0f', now), member)
local ending = string.format('%.0f', now + outliving)
redis.call('PEXPIREAT', hash, ending)
redis.call('PEXPIREAT', members, ending)
return {'done', life}
""")

#: get LIFE BYTES KEY..., missing LIFE KEY..., list LIFE PREFIX, count LIFE PREFIX
READ = Script("""
local hash, what, life = KEYS[1], ARGV[1], ARGV[2]
if redis.call('HGET', hash, 'life') ~= life then
    return {'gone'}
end
local found, length = {}, 0
if what == 'get' then
    for i = 4, #ARGV do
        local value = redis.call('HGET', hash, ARGV[i])
        length = length + #(value or '')
        if i > 4 and length > tonumber(ARGV[3]) then
            break
        end
        found[#found + 1] = value
    end
elseif what == 'missing' then
    for i = 3, #ARGV do
        if redis.call('HEXISTS', hash, ARGV[i]) == 0 then
            found[#found + 1] = i - 3
        end
    end
else
    local prefix = ARGV[3]
    for _, field in ipairs(redis.call('HKEYS', hash)) do
        if string.sub(field, 1, #prefix) == prefix then
            found[#found + 1] = field
        end
    end
    if what == 'count' then
        return {'done', {#found}}
    end
end
return {'done', found}
""")

#: ATTEMPT WHAT LIFE CHANNEL NUMBER ..., with: set KEY VALUE KEY VALUE..., deletes PREFIX, or one of
#:
#: compare KEY EXPECTED DESIRED, add KEY AMOUNT, append KEY VALUE LONGEST, delete KEY, swap KEY HELD VALUE
#: (HELD and VALUE are ``n`` for none, or ``v`` and the value)
#:
#: or together LONGEST and several changes of one key, each with its name and three arguments, executed in
#: order up to the first that fails, or a compare that finds a value other than DESIRED. The reply has the
#: status, length and value of each; a compare answers ``long`` for a value of more than LONGEST bytes.
#:
#: The change precedes the number: the server refuses (for lack of memory or permission) at the first command
#: that writes. (With together, some changes may be executed before one that is not permitted.) After an
#: attempt has been answered without a change, earlier attempts in transit change nothing either.
WRITE = Script("""
local hash, attempt, what, life, channel, number, key = KEYS[1], unpack(ARGV, 1, 6)
if redis.call('HGET', hash, 'life') ~= life then
    return {'gone'}
end
local kept = redis.call('HGET', hash, channel)
if kept then
    local last, latest, reply = string.match(kept, '^(%d+) (%d+)(.*)$')
    if last == number and reply ~= '' then
        return {'done', string.sub(reply, 2)}
    elseif tonumber(last) > tonumber(number) or (last == number and tonumber(latest) > tonumber(attempt)) then
        return {'late'}
    end
end
local function not_done(...)
    if attempt ~= '0' then
        redis.call('HSET', hash, channel, number .. ' ' .. attempt)
    end
    return {...}
end
local changed = {}
local function put(key, value)
    redis.call('HSET', hash, key, value)
    changed[#changed + 1] = key
end
-- Each returns its status and a value or nothing; on an error of the server, no status and the error.
local change = {}
function change.set(key, value)
    put(key, value)
    return 'done', ''
end
function change.delete(key)
    if redis.call('HDEL', hash, key) == 0 then
        return 'unchanged'
    end
    return 'done', ''
end
function change.append(key, value, longest)
    local length = redis.call('HSTRLEN', hash, key) + #value
    if length > tonumber(longest) then
        return 'long', tostring(length)
    end
    put(key, (redis.call('HGET', hash, key) or '') .. value)
    return 'done', ''
end
function change.add(key, amount)
    local sum = redis.pcall('HINCRBY', hash, key, amount)
    if type(sum) ~= 'number' then
        local held = redis.call('HGET', hash, key)
        return held and 'held', held or sum
    end
    changed[#changed + 1] = key
    return 'done', redis.call('HGET', hash, key)  -- the number has lost digits
end
function change.compare(key, expected, desired)
    local held = redis.call('HGET', hash, key)
    if (held or '') ~= expected then
        return held and 'held' or 'unchanged', held or nil
    end
    put(key, desired)
    return 'done', ''
end
function change.swap(key, held, value)
    local holds = redis.call('HGET', hash, key)
    if (holds and 'v' .. holds or 'n') ~= held then
        return 'unchanged'
    elseif value == 'n' then
        redis.call('HDEL', hash, key)
    else
        put(key, string.sub(value, 2))
    end
    return 'done', ''
end
local reply = ''
if what == 'set' then
    for i = 6, #ARGV, 2 do
        put(ARGV[i], ARGV[i + 1])
    end
elseif what == 'deletes' then
    local found = {}
    for _, field in ipairs(redis.call('HKEYS', hash)) do
        if string.sub(field, 1, #key) == key then
            found[#found + 1] = field
        end
    end
    if #found == 0 then
        return not_done('unchanged')
    end
    for i = 1, #found, 1000 do
        redis.call('HDEL', hash, unpack(found, i, math.min(i + 999, #found)))
    end
    reply = tostring(#found)
elseif what == 'together' then
    local longest, answers, done = tonumber(ARGV[6]), {}, false
    for i = 7, #ARGV, 4 do
        local name, first, second = ARGV[i], ARGV[i + 2], ARGV[i + 3]
        local word, value = change[name](ARGV[i + 1], first, second)
        if not word then
            return value
        end
        done = done or word == 'done'
        local as_set = name == 'compare' and (value or first) == second
        if name == 'compare' and value and #value > longest then
            word, value, as_set = 'long', tostring(#value), false
        elseif name == 'add' then
            value = string.sub(value, 1, longest)
        end
        value = value or ''
        answers[#answers + 1] = word .. ' ' .. #value .. ' ' .. value
        if word ~= 'done' and name ~= 'delete' and not as_set then
            break
        end
    end
    reply = table.concat(answers)
    if not done then
        return not_done('done', reply)
    end
else
    local word
    word, reply = change[what](key, ARGV[7], ARGV[8])
    if not word then
        return reply
    elseif word ~= 'done' then
        return not_done(word, reply)
    end
end
redis.call('HSET', hash, channel, number .. ' ' .. attempt .. '=' .. reply)
for _, field in ipairs(changed) do
    redis.pcall('PUBLISH', hash .. ':' .. string.sub(field, 2), '')
end
return {'done', reply}
""")
