"""Server-side scripts: everything that must be atomic, and block writes, which would cost a command each otherwise.

They need Redis 7.0 or Valkey, no extension. All keys of one call share a hash tag (see layout), so they run in a
Cluster; block keys are built inside from hashes packed 8 bytes each. Clocks are the server's.

Masks are little-endian strings: slot s is bit ``s % 8`` of byte ``s // 8``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.exceptions import NoScriptError

_COMMON = """
local call = redis.call
local byte, char, sub, rep, floor = string.byte, string.char, string.sub, string.rep, math.floor
local function now_ms()
  local t = call('TIME')
  return tonumber(t[1]) * 1000 + floor(tonumber(t[2]) / 1000)
end
local function int(n) return string.format('%.0f', n) end
local CHUNK = 512  -- bytes of hashes: one MGET for 64 keys costs what two GETs cost
local function keys_of(p, hashes, first)
  local keys = {}
  for j = first, math.min(first + CHUNK - 1, #hashes), 8 do keys[#keys + 1] = p .. sub(hashes, j, j + 7) end
  return keys
end
local function with_bit(m, slot, on)
  local at, b = floor(slot / 8) + 1, bit.lshift(1, slot % 8)
  if #m < at then m = m .. rep('\\0', at - #m) end
  local old = byte(m, at)
  local new = on and bit.bor(old, b) or bit.band(old, 255 - b)
  return sub(m, 1, at - 1) .. char(new) .. sub(m, at + 1)
end
local function fence_of(leases, replica)
  local lease = call('HGET', leases, replica)
  return lease and string.match(lease, '^(%d+):')
end
"""

# KEYS 1 roster, 2 slots, 3 version, 4 leases (CLAIM: 5 the sign of life). The roster and the slots live and die
# together: when either is gone, or they disagree, both begin anew under another epoch, and block keys of the old one
# are out of everyone's reach.
_STATE = """
local R, S, V, K = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local function publish(epoch, counter, ttl) call('SET', V, epoch .. ':' .. counter, 'EX', ttl) end
local function ensure(ttl)
  local e, other = call('HGET', S, '@e'), call('HGET', R, '@e')
  if not e or e ~= other then
    local t = call('TIME')
    local fresh = string.format('%04x', tonumber(t[2]) % 65536)
    if fresh == e or fresh == other then fresh = string.format('%04x', (tonumber(t[2]) + 1) % 65536) end
    call('DEL', R, S)
    call('HSET', S, '@e', fresh, '@c', int(now_ms()), '@n', '0', '@m', '')
    call('HSET', R, '@e', fresh)
    e = fresh
  end
  call('EXPIRE', R, ttl) call('EXPIRE', S, ttl)
  publish(e, call('HGET', S, '@c'), ttl)
  return e
end
local function changed(epoch, ttl) publish(epoch, int(call('HINCRBY', S, '@c', 1)), ttl) end
local function retire(slot, linger)
  call('HSET', S, '@m', with_bit(call('HGET', S, '@m') or '', tonumber(slot), false), slot, int(now_ms() + linger))
end
local function slot_of(record)
  if not record then return nil, 0 end
  local slot, inc = string.match(record, '^(%d*):(%d+):')
  if slot == '' then slot = nil end
  return slot, tonumber(inc)
end
"""

BEGIN = (
    _COMMON
    + _STATE
    + """
local replica, fence, body, ttl, linger, max = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
if fence_of(K, replica) ~= fence then return {'fenced'} end
local epoch = ensure(ttl)
local old, inc = slot_of(call('HGET', R, replica))
if old then retire(old, linger) end
local slot, now, all = nil, now_ms(), call('HGETALL', S)
for i = 1, #all, 2 do
  local s = tonumber(all[i])
  if s and tonumber(all[i + 1]) <= now and (not slot or s < slot) then slot = s end
end
if slot then call('HDEL', S, tostring(slot))
else
  slot = tonumber(call('HGET', S, '@n'))
  if slot >= max then
    call('HSET', R, replica, ':' .. int(inc + 1) .. ':' .. body)
    changed(epoch, ttl)
    return {'full', '', int(inc + 1), epoch}
  end
  call('HSET', S, '@n', int(slot + 1))
end
call('HSET', S, '@m', with_bit(call('HGET', S, '@m') or '', slot, true))
call('HSET', R, replica, int(slot) .. ':' .. int(inc + 1) .. ':' .. body)
changed(epoch, ttl)
return {'ok', int(slot), int(inc + 1), epoch}
"""
)

# ARGV: replica, fence, slot or '', json, ttl s, linger ms, '1' when readers should notice at once
UPDATE = (
    _COMMON
    + _STATE
    + """
local replica, fence, slot, body, ttl, linger = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
if fence_of(K, replica) ~= fence then return 'fenced' end
local epoch = ensure(ttl)
local old, inc = slot_of(call('HGET', R, replica))
if slot ~= '' and (old ~= slot or epoch ~= ARGV[8]) then return 'stale' end
if slot == '' and old then retire(old, linger) end
call('HSET', R, replica, slot .. ':' .. int(inc) .. ':' .. body)
if ARGV[7] == '1' then changed(epoch, ttl) end
return 'ok'
"""
)

# ARGV: replica, fence, ttl s, linger ms. KEYS 5: the snapshot
RETIRE = (
    _COMMON
    + _STATE
    + """
local replica, fence, ttl, linger = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if fence_of(K, replica) ~= fence then return 'fenced' end
local epoch = ensure(ttl)
local old = slot_of(call('HGET', R, replica))
if old then retire(old, linger) end
call('HDEL', R, replica) call('HDEL', K, replica) call('DEL', KEYS[5])
changed(epoch, ttl)
return 'ok'
"""
)

# ARGV: indexer, lease ms, ttl s, then replica and held fence ('0': none) of every replica to renew or to claim.
# A lease of ours that nobody took is renewed even when it ran out. Free ones are taken up to this indexer's fair share.
CLAIM = (
    _COMMON
    + _STATE
    + """
local me, lease_ms, ttl, now = ARGV[1], tonumber(ARGV[2]), ARGV[3], now_ms()
local epoch = ensure(ttl)
local alive, held = 0, {}
call('SET', KEYS[5], me, 'PX', int(lease_ms * 3))
call('HSET', K, '@i' .. me, int(now + lease_ms))
local all = call('HGETALL', K)
for i = 1, #all, 2 do
  if sub(all[i], 1, 2) == '@i' then
    if tonumber(all[i + 1]) > now then alive = alive + 1 else call('HDEL', K, all[i]) end
  else held[all[i]] = all[i + 1] end
end
local fair = math.ceil((#ARGV - 3) / 2 / alive)
local mine, claimed, free, top = {}, {}, {}, tonumber(held['@f'] or '0')
for i = 4, #ARGV, 2 do
  local replica, fence, until_ms, who = ARGV[i], nil, nil, nil
  if held[replica] then fence, until_ms, who = string.match(held[replica], '^(%d+):(%d+):(.*)$') end
  if fence and who == me and fence == ARGV[i + 1] then
    call('HSET', K, replica, fence .. ':' .. int(now + lease_ms) .. ':' .. me)
    mine[#mine + 1] = replica
  elseif not fence or tonumber(until_ms) <= now or who == me then free[#free + 1] = replica end
end
for _, replica in ipairs(free) do
  if #mine + #claimed / 2 >= fair then break end
  top = math.max(top + 1, now)
  call('HSET', K, replica, int(top) .. ':' .. int(now + lease_ms) .. ':' .. me)
  claimed[#claimed + 1] = replica
  claimed[#claimed + 1] = int(top)
end
if #claimed > 0 then call('HSET', K, '@f', int(top)) end
call('EXPIRE', K, ttl)
return {epoch, fair, alive, mine, claimed}
"""
)

# KEYS 1 leases; ARGV: indexer ('' to stay registered), then replica and fence
RELEASE = (
    _COMMON
    + """
if ARGV[1] ~= '' then call('HDEL', KEYS[1], '@i' .. ARGV[1]) end
for i = 2, #ARGV, 2 do
  if fence_of(KEYS[1], ARGV[i]) == ARGV[i + 1] then call('HDEL', KEYS[1], ARGV[i]) end
end
return 'ok'
"""
)

# KEYS 1 slots, 2 leases, 3 roster; ARGV: base of the keys, ttl s, then per section: '1' store / '0' remove, key family
# letter, epoch, slot, replica, fence, packed hashes. Returns the numbers of refused sections, from 1. Values repeat a
# lot within a batch, so the new one is computed once for each old one. Every rewrite drops the bits of slots that
# are not live, so one lifetime after its retirement no bitmap mentions a slot.
WRITE = (
    _COMMON
    + """
local base, ttl, refused = ARGV[1], ARGV[2], {}
local mask, epoch = call('HGET', KEYS[1], '@m') or '', call('HGET', KEYS[1], '@e')
local live = {byte(mask, 1, -1)}
local raw_epoch = epoch and char(tonumber(sub(epoch, 1, 2), 16), tonumber(sub(epoch, 3, 4), 16))
local function renew(old, at, b, on)
  local out, last = {}, 0
  local n = on and math.max(#old, at) or #old
  for i = 1, n do
    local v = bit.band(byte(old, i) or 0, live[i] or 0)
    if i == at then v = on and bit.bor(v, b) or bit.band(v, 255 - b) end
    if v ~= 0 then last = i end
    out[i] = char(v)
  end
  return table.concat(out, '', 1, last)
end
for i = 3, #ARGV, 7 do
  local on, slot, hashes = ARGV[i] == '1', tonumber(ARGV[i + 3]), ARGV[i + 6]
  local at, b = floor(slot / 8) + 1, bit.lshift(1, slot % 8)
  if ARGV[i + 2] ~= epoch or fence_of(KEYS[2], ARGV[i + 4]) ~= ARGV[i + 5] or bit.band(live[at] or 0, b) == 0 then
    refused[#refused + 1] = (i - 3) / 7 + 1
  else
    local p, memo, single = base .. ARGV[i + 1] .. raw_epoch, {}, rep('\\0', at - 1) .. char(b)
    if on and ARGV[i + 1] ~= 'b' then call('HSET', KEYS[3], '@t' .. ARGV[i + 1], '1') end
    for first = 1, #hashes, CHUNK do
      local keys, gone = keys_of(p, hashes, first), {}
      for n, old in ipairs(call('MGET', unpack(keys))) do
        if on then
          local new = old and memo[old] or not old and single
          if not new then new = renew(old, at, b, true) memo[old] = new end
          call('SETEX', keys[n], ttl, new)
        elseif old then
          local new = memo[old]
          if not new then new = renew(old, at, b, false) memo[old] = new end
          if new == '' then gone[#gone + 1] = keys[n] elseif new ~= old then call('SET', keys[n], new, 'KEEPTTL') end
        end
      end
      if #gone > 0 then call('DEL', unpack(gone)) end
    end
  end
end
return refused
"""
)

# KEYS 1 the placements' base; ARGV: most entries a key, then for each placement: replica tag, lifetime s, packed hashes
PLACE = (
    _COMMON
    + """
local cap, now = tonumber(ARGV[1]), floor(now_ms() / 1000)
local function le32(n)
  return char(n % 256, floor(n / 256) % 256, floor(n / 65536) % 256, floor(n / 16777216) % 256)
end
for at = 2, #ARGV, 3 do
  local tag, ttl, hashes = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local mine, memo = tag .. le32(now + ttl), {}
  for first = 1, #hashes, CHUNK do
    local keys = keys_of(KEYS[1], hashes, first)
    for n, old in ipairs(call('MGET', unpack(keys))) do
      local new = old and memo[old] or not old and mine
      if not new then
        local out = {mine}
        for i = 1, #old, 8 do
          local b1, b2, b3, b4 = byte(old, i + 4, i + 7)
          if #out < cap and sub(old, i, i + 3) ~= tag and b1 + b2 * 256 + b3 * 65536 + b4 * 16777216 > now then
            out[#out + 1] = sub(old, i, i + 7)
          end
        end
        new = table.concat(out)
        memo[old] = new
      end
      call('SETEX', keys[n], ttl, new)
    end
  end
end
return 'ok'
"""
)

# KEYS 1 announcements; ARGV: gateway, ttl ms, json. An unchanged list is not written again.
ANNOUNCE = (
    _COMMON
    + """
local now = now_ms()
if call('HGET', KEYS[1], 'l' .. ARGV[1]) ~= ARGV[3] then call('HSET', KEYS[1], 'l' .. ARGV[1], ARGV[3]) end
call('HSET', KEYS[1], 'u' .. ARGV[1], int(now + tonumber(ARGV[2])))
local last, all = 0, call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if sub(all[i], 1, 1) == 'u' then
    local untilled = tonumber(all[i + 1])
    if untilled <= now then call('HDEL', KEYS[1], all[i], 'l' .. sub(all[i], 2))
    elseif untilled > last then last = untilled end
  end
end
call('PEXPIRE', KEYS[1], int(last - now))
return 'ok'
"""
)

# KEYS 1 list of gateways, 2 this one's load; ARGV: gateway, ttl ms, load. The list is what tells readers which loads
# to read, in the same MGET as everything else; the loads themselves vanish with their own lease.
LOADS = (
    _COMMON
    + """
local now, ttl = now_ms(), tonumber(ARGV[2])
call('SET', KEYS[2], ARGV[3], 'PX', ttl)
local out, last = {int(now + ttl) .. ' ' .. ARGV[1]}, now + ttl
for until_ms, gateway in string.gmatch(call('GET', KEYS[1]) or '', '(%d+) ([^\\n]+)') do
  if gateway ~= ARGV[1] and tonumber(until_ms) > now then
    out[#out + 1] = until_ms .. ' ' .. gateway
    last = math.max(last, tonumber(until_ms))
  end
end
call('SET', KEYS[1], table.concat(out, '\\n'), 'PX', int(last - now))
return 'ok'
"""
)

# KEYS 1 leases, 2 snapshot; ARGV: replica, fence, ttl s, blob
SNAPSHOT = (
    _COMMON
    + """
if fence_of(KEYS[1], ARGV[1]) ~= ARGV[2] then return 'fenced' end
call('SET', KEYS[2], ARGV[4], 'EX', ARGV[3])
return 'ok'
"""
)

_SHA: dict[str, str] = {}


async def run_script(
    execute: Callable[..., Awaitable[Any]], script: str, keys: Sequence[bytes], args: Sequence[Any]
) -> Any:
    """EVALSHA, and EVAL where the server does not know the script yet (a restart, a failover)."""
    sha = _SHA.get(script)
    if sha is None:
        sha = _SHA[script] = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    try:
        return await execute("EVALSHA", sha, len(keys), *keys, *args)
    except NoScriptError:
        return await execute("EVAL", script, len(keys), *keys, *args)
