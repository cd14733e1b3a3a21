"""The block pool under any sequence of uses: a model of owners says what must be true."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.engine.blocks import BlockPool, Lease

NAMES = [bytes([n]) for n in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Several requests that admit, take, share, register and free as they like."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.leases: list[Lease] = []
        self.owned: list[int] = []  # one entry for each ownership
        self.named: dict[bytes, int] = {}

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=3, unique=True), num_new=st.integers(0, 9))
    def admit(self, names: list[bytes], num_new: int) -> None:
        found = self.pool.lookup(names)
        assert [self.named[n] for n in names[: len(found)]] == found
        before = self.pool.counts()
        room = self.pool.num_available - sum(self.pool.owners(b) == 0 for b in found)
        lease = self.pool.admit(found, num_new)
        assert (num_new <= room) == (lease is not None)
        if lease is None:
            assert before == self.pool.counts()
        else:
            self.leases.append(lease)
            self.owned += found

    @precondition(lambda self: any(lease.num_left for lease in self.leases))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([lease for lease in self.leases if lease.num_left]))
        block = lease.take()
        assert block not in self.owned
        assert 1 == self.pool.owners(block)
        self.owned.append(block)
        self.named = {name: b for name, b in self.named.items() if b != block}

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.owned))
        self.pool.share(block)
        self.owned.append(block)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def register(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(self.owned))
        self.pool.register(block, name)
        if name not in self.named and block not in self.named.values():
            self.named[name] = block

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.owned))
        self.pool.free(block)
        self.owned.remove(block)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.pool.num_blocks - 1))
        self.pool.forget(block)
        self.named = {name: b for name, b in self.named.items() if b != block}
        assert block not in self.pool.lookup(NAMES)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        lease.close()
        self.leases.remove(lease)

    @invariant()
    def owners_and_counters_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        counts, owners = self.pool.counts(), Counter(self.owned)
        assert [owners[b] for b in range(self.pool.num_blocks)] == [
            self.pool.owners(b) for b in range(self.pool.num_blocks)
        ]
        assert len(owners) == counts.live
        assert 0 == counts.leaked
        assert sum(lease.num_left for lease in self.leases) == counts.promised
        assert counts.promised <= counts.num_blocks - counts.live

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for block in self.owned:
            self.pool.free(block)
        for lease in self.leases:
            lease.close()
        self.pool.check_integrity()
        assert 0 == self.pool.counts().live
        assert self.pool.num_blocks == self.pool.num_available


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
