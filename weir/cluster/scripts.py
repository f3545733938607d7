"""Every Lua script, with its KEYS and ARGV: each read-modify-write is one of these.

All are idempotent: a script that ran although its caller saw a broken connection may run again. Points in time come
from Redis's own clock (TIME), so that the clocks of the writers need not agree; durations are in milliseconds. Keys get
their TTL in the script that writes them. Needs Redis or Valkey 6.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha1


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", sha1(self.text.encode(), usedforsecurity=False).hexdigest())


_NOW_MS = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# Sets a TTL, but never a shorter one: for keys that hold entries of several lifetimes.
_EXTEND_TTL = """
local function extend_ttl(key, ttl_ms)
  if redis.call('PTTL', key) < tonumber(ttl_ms) then redis.call('PEXPIRE', key, ttl_ms) end
end
"""

# KEYS: link key. ARGV: ttl_ms. Returns 1 if the key was still there. A write, so that a replica refuses it.
TOUCH_LINK = Script("""
local had_key = redis.call('EXISTS', KEYS[1])
redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
return had_key
""")

# A registration takes over from an incarnation that started earlier and refuses one that started later; `started` is
# Redis's own time of the first registration, in microseconds, and grows from one incarnation to the next.
# KEYS: worker, index, changes.
# ARGV: worker id, incarnation, started or '' the first time, info, its notable part (a change of it is announced),
#       ttl_ms, most entries of changes.
# Returns {1, started}, or {0, incarnation that holds the name}.
REGISTER = Script(
    _NOW_MS
    + _EXTEND_TTL
    + """
local stored = redis.call('HMGET', KEYS[1], 'incarnation', 'started', 'notable', 'left')
local started = tonumber(ARGV[3])
if not started then
  if stored[1] == ARGV[2] then
    started = tonumber(stored[2])
  else
    started = math.max(time[1] * 1000000 + time[2], (tonumber(stored[2]) or 0) + 1)
  end
end
if stored[1] and stored[1] ~= ARGV[2] and tonumber(stored[2]) >= started then return {0, stored[1]} end
if stored[1] == ARGV[2] and stored[4] then return {0, stored[1]} end
local started_text = string.format('%.0f', started)
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'started', started_text, 'info', ARGV[4], 'notable', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_ms)
redis.call('ZADD', KEYS[2], now_ms + ARGV[6], ARGV[1])
extend_ttl(KEYS[2], ARGV[6])
if stored[1] ~= ARGV[2] or stored[3] ~= ARGV[5] then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[7], '*', 'worker', ARGV[1])
  extend_ttl(KEYS[3], ARGV[6])
end
return {1, started_text}
"""
)

# Leaves a mark in place of the registration, for one TTL: others learn that the worker left, and a heartbeat that is
# still on its way cannot bring it back.
# KEYS: worker, index, changes. ARGV: worker id, incarnation, ttl_ms, most entries of changes.
# Returns 1, or 0 if another incarnation holds the name.
DEREGISTER = Script(
    _EXTEND_TTL
    + """
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], 'info', 'notable')
redis.call('HSET', KEYS[1], 'left', '1')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'worker', ARGV[1])
extend_ttl(KEYS[3], ARGV[3])
return 1
"""
)

# KEYS: index, changes. ARGV: prefix of the worker keys (in the same slot).
# Returns {id of the last change, worker id, incarnation, info or '' if it left, worker id, ...}.
LIST_WORKERS = Script(
    _NOW_MS
    + """
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local reply = {last and last[1] or '0-0'}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now_ms, '+inf')) do
  local stored = redis.call('HMGET', ARGV[1] .. id, 'incarnation', 'info')
  if stored[1] then
    reply[#reply + 1] = id
    reply[#reply + 1] = stored[1]
    reply[#reply + 1] = stored[2] or ''
  end
end
return reply
"""
)

# The one rule of a request's states (see `request_journal.is_accepted`).
# KEYS: request. ARGV: owner, epoch, rank, 1 if terminal, record, remaining_ms or '' without a deadline, ttl_ms.
# Returns 1 if accepted.
RECORD_REQUEST = Script(
    _NOW_MS
    + """
local stored = redis.call('HMGET', KEYS[1], 'owner', 'epoch', 'rank', 'terminal')
if stored[1] then
  local epoch, rank = tonumber(stored[2]), tonumber(stored[3])
  local new_epoch, new_rank = tonumber(ARGV[2]), tonumber(ARGV[3])
  local grows = new_epoch > epoch or (new_epoch == epoch and new_rank > rank)
  if stored[4] == '1' or stored[1] ~= ARGV[1] or not grows then return 0 end
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'epoch', ARGV[2], 'rank', ARGV[3], 'terminal', ARGV[4],
  'record', ARGV[5], 'deadline_ms', ARGV[6] == '' and '' or string.format('%.0f', now_ms + ARGV[6]))
redis.call('PEXPIRE', KEYS[1], ARGV[7])
return 1
"""
)

# KEYS: request. Returns nil, or {record, remaining_ms or '' without a deadline}.
GET_REQUEST = Script(
    _NOW_MS
    + """
local stored = redis.call('HMGET', KEYS[1], 'record', 'deadline_ms')
if not stored[1] then return nil end
local remaining = ''
if stored[2] ~= '' then remaining = string.format('%.0f', math.max(0, stored[2] - now_ms)) end
return {stored[1], remaining}
"""
)

# KEYS: ownership. ARGV: name of the holding, the holding, ttl_ms.
RECORD_HOLDING = Script(
    _NOW_MS
    + _EXTEND_TTL
    + """
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', now_ms + ARGV[3]) .. ' ' .. ARGV[2])
extend_ttl(KEYS[1], ARGV[3])
return 1
"""
)

# KEYS: ownership. ARGV: names of holdings.
CLEAR_HOLDINGS = Script("""
redis.call('HDEL', KEYS[1], unpack(ARGV))
return 1
""")

# KEYS: ownership. Returns {name, remaining_ms, holding, name, ...} of those whose time has not come; drops the others.
LIST_HOLDINGS = Script(
    _NOW_MS
    + """
local reply = {}
local stored = redis.call('HGETALL', KEYS[1])
for i = 1, #stored, 2 do
  local until_ms, holding = string.match(stored[i + 1], '^(%d+) (.*)$')
  if until_ms - now_ms > 0 then
    reply[#reply + 1] = stored[i]
    reply[#reply + 1] = string.format('%.0f', until_ms - now_ms)
    reply[#reply + 1] = holding
  else
    redis.call('HDEL', KEYS[1], stored[i])
  end
end
return reply
"""
)

# KEYS: held. ARGV: request id, ttl_ms.
ADD_HELD = Script(
    _NOW_MS
    + _EXTEND_TTL
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
local until_ms = now_ms + ARGV[2]
if until_ms > (tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1])) or 0) then
  redis.call('ZADD', KEYS[1], until_ms, ARGV[1])
end
extend_ttl(KEYS[1], ARGV[2])
return 1
"""
)

# KEYS: held. ARGV: request id.
REMOVE_HELD = Script("""
redis.call('ZREM', KEYS[1], ARGV[1])
return 1
""")

# KEYS: held. ARGV: most request ids. Returns those whose time has not come, the latest first.
LIST_HELD = Script(
    _NOW_MS
    + """
return redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', '(' .. string.format('%.0f', now_ms), 'LIMIT', 0, ARGV[1])
"""
)

# The prefix index of a worker is a set and a stream of its changes. Entry ids are `generation-number`: a reset starts a
# generation (never lower than Redis's time in ms) with number 0, and every further entry has the next number, so that a
# reader sees a gap. Fields: i incarnation, b when it was born (Redis's time of its first reset, microseconds),
# c cleared, r removed, s stored: 16-byte hashes end to end, applied in this order.
_KV_LAST = """
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local last_generation, last_number, last_incarnation, last_born = 0, -1, nil, 0
if last then
  last_generation, last_number = string.match(last[1], '^(%d+)-(%d+)$')
  last_generation, last_number = tonumber(last_generation), tonumber(last_number)
  for i = 1, #last[2], 2 do
    if last[2][i] == 'i' then last_incarnation = last[2][i + 1] end
    if last[2][i] == 'b' then last_born = tonumber(last[2][i + 1]) end
  end
end
"""

# Empties the set and starts a generation, unless an incarnation that was born later has done so.
# KEYS: blocks, stream. ARGV: incarnation, born or '' the first time, lowest generation, most entries, ttl_ms.
# Returns {1, generation, born}, or {0, incarnation that has taken over}.
KV_RESET = Script(
    _NOW_MS
    + _KV_LAST
    + """
local born = tonumber(ARGV[2])
if not born then
  born = last_incarnation == ARGV[1] and last_born or math.max(time[1] * 1000000 + time[2], last_born + 1)
elseif last_incarnation and last_incarnation ~= ARGV[1] and last_born >= born then
  return {0, last_incarnation}
end
local generation = string.format('%.0f', math.max(now_ms, last_generation + 1, tonumber(ARGV[3])))
local born_text = string.format('%.0f', born)
redis.call('DEL', KEYS[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], generation .. '-0', 'i', ARGV[1], 'b', born_text, 'c', '1')
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return {1, generation, born_text}
"""
)

# Applies entry `number` of a generation and appends it, if the entry before it is the last one; does nothing if it is
# itself the last one already. With no number it only renews the TTL.
# KEYS: blocks, stream. ARGV: incarnation, born, generation, number of the last entry that was published, most entries,
#       ttl_ms, '1' if cleared, removed, stored (the last three empty for a mere renewal).
# Returns 1, or 0 if entries are missing: then the caller resets.
KV_PUBLISH = Script(
    _KV_LAST
    + """
local before = tonumber(ARGV[4])
if last_generation ~= tonumber(ARGV[3]) then return 0 end
local is_renewal = ARGV[7] == '' and ARGV[8] == '' and ARGV[9] == ''
if is_renewal then
  if last_number ~= before then return 0 end
elseif last_number == before then
  local function each_chunk(hashes, command)
    for first = 1, #hashes, 16 * 512 do
      local chunk = {}
      for at = first, math.min(#hashes, first + 16 * 512 - 1), 16 do
        chunk[#chunk + 1] = string.sub(hashes, at, at + 15)
      end
      redis.call(command, KEYS[1], unpack(chunk))
    end
  end
  if ARGV[7] ~= '' then redis.call('DEL', KEYS[1]) end
  each_chunk(ARGV[8], 'SREM')
  each_chunk(ARGV[9], 'SADD')
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], ARGV[3] .. '-' .. string.format('%.0f', before + 1),
    'i', ARGV[1], 'b', ARGV[2], 'c', ARGV[7], 'r', ARGV[8], 's', ARGV[9])
elseif last_number ~= before + 1 then
  return 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
return 1
"""
)

# KEYS: blocks, stream. Returns {id of the last entry, its incarnation}, or nil if there is none.
KV_HEAD = Script(
    _KV_LAST
    + """
if not last then return nil end
return {last[1], last_incarnation}
"""
)
