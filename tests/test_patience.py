"""The patient timeout: strikes on what is slow, not on what merely waits for a busy loop."""

import asyncio
import time

import pytest

from litellm_prefix_router.patience import SLICES, PatientTimeout


async def test_strikes_when_nothing_comes():
    with pytest.raises(TimeoutError):
        async with PatientTimeout(0.01):
            await asyncio.Event().wait()


async def test_a_busy_loop_does_not_count():
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def stall(times):
        time.sleep(0.03)
        if times:
            loop.call_soon(stall, times - 1)
        else:
            answer.set_result("here")

    loop.call_soon(stall, SLICES // 2)
    async with PatientTimeout(0.01, patience=1000):
        assert await answer == "here"


async def test_patience_has_an_end():
    loop = asyncio.get_running_loop()
    stop = False

    def stall():
        time.sleep(0.02)
        if not stop:
            loop.call_soon(stall)

    loop.call_soon(stall)
    try:
        with pytest.raises(TimeoutError):
            async with PatientTimeout(0.005, patience=4):
                await asyncio.Event().wait()
    finally:
        stop = True


async def test_cancelling_from_outside_stays_a_cancellation():
    async def work():
        async with PatientTimeout(60):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_in_time_leaves_no_trace():
    async with PatientTimeout(0.01):
        await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
