"""The scripts that a store in Redis runs on its server: each is one step, which no other can come between.

A job has two keys, both with ``{shoal:<job>}`` in their names, so that one slot of a cluster holds them:

``{shoal:<job>}``          a hash: ``life``, which life of the job this is; ``k`` and a key: its value; ``o``
                           and the name of a line: the number of the line's last change, which attempt at it
                           was heard last, and once it is done "=" and the reply
``{shoal:<job>}:members``  a sorted set: who has the store open, and since when nobody has heard of it

``{shoal:<job>}:<key>`` is the channel on which a message comes when the key is set.

A reply is a list: a word, and what the word says there is.
"""

from __future__ import annotations

import hashlib


class Script:
    """One script.

    Attributes:
        text: in Lua.
        digest: by which a server knows it, once it has had the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.digest = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


#: join MEMBER LIFE MILLISECONDS, keep MEMBER LIFE MILLISECONDS, leave MEMBER LIFE MILLISECONDS LINE...
LIFE = Script("""
local hash, members = KEYS[1], KEYS[2]
local what, member, mine, outliving = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local life = redis.call('HGET', hash, 'life')
if what == 'join' then
    redis.call('PUBLISH', hash .. ':', '')  -- who may not do this hears it before anything is written
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

#: ATTEMPT WHAT LIFE LINE NUMBER ..., with: set KEY VALUE KEY VALUE..., compare KEY EXPECTED DESIRED,
#: add KEY AMOUNT, append KEY VALUE LONGEST, swap KEY HELD VALUE (each a letter, n for none, and the value),
#: delete KEY, deletes PREFIX
#:
#: The change comes before the number: what the server refuses (for want of memory, or of a permission) it
#: refuses at the first command that writes.  What a later attempt has looked at and not done, an earlier one
#: that is still on the way does not do either: the client has had its answer.
WRITE = Script("""
local hash, attempt, what, life, line, number, key = KEYS[1], unpack(ARGV, 1, 6)
if redis.call('HGET', hash, 'life') ~= life then
    return {'gone'}
end
local kept = redis.call('HGET', hash, line)
if kept then
    local last, heard, reply = string.match(kept, '^(%d+) (%d+)(.*)$')
    if last == number and reply ~= '' then
        return {'done', string.sub(reply, 2)}
    elseif tonumber(last) > tonumber(number) or (last == number and tonumber(heard) > tonumber(attempt)) then
        return {'late'}
    end
end
local function not_done(...)
    if attempt ~= '0' then
        redis.call('HSET', hash, line, number .. ' ' .. attempt)
    end
    return {...}
end
local changed, reply = {}, ''
if what == 'set' then
    for i = 6, #ARGV, 2 do
        redis.call('HSET', hash, ARGV[i], ARGV[i + 1])
        changed[#changed + 1] = ARGV[i]
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
elseif what == 'delete' then
    if redis.call('HDEL', hash, key) == 0 then
        return not_done('unchanged')
    end
elseif what == 'append' then
    local length = redis.call('HSTRLEN', hash, key) + #ARGV[7]
    if length > tonumber(ARGV[8]) then
        return not_done('long', tostring(length))
    end
    redis.call('HSET', hash, key, (redis.call('HGET', hash, key) or '') .. ARGV[7])
    changed[1] = key
else
    local held = redis.call('HGET', hash, key)
    if what == 'add' then
        local sum = redis.pcall('HINCRBY', hash, key, ARGV[7])
        if type(sum) ~= 'number' then
            return held and not_done('held', held) or sum
        end
        reply = redis.call('HGET', hash, key)  -- the number has lost digits
        changed[1] = key
    elseif what == 'compare' then
        if (held or '') ~= ARGV[7] then
            return held and not_done('held', held) or not_done('unchanged')
        end
        redis.call('HSET', hash, key, ARGV[8])
        changed[1] = key
    else
        if (held and 'v' .. held or 'n') ~= ARGV[7] then
            return not_done('unchanged')
        elseif ARGV[8] == 'n' then
            redis.call('HDEL', hash, key)
        else
            redis.call('HSET', hash, key, string.sub(ARGV[8], 2))
            changed[1] = key
        end
    end
end
redis.call('HSET', hash, line, number .. ' ' .. attempt .. '=' .. reply)
for _, field in ipairs(changed) do
    redis.pcall('PUBLISH', hash .. ':' .. string.sub(field, 2), '')
end
return {'done', reply}
""")
