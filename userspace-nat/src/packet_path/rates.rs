//! A VM's rates, for what the engine itself carries.
//!
//! Whoever puts a packet on its last way charges it, so that each is charged once: the programs what
//! they translate, whether or not it came through the engine before; the engine what it translates
//! and sends as it is, which is fragments and ICMP errors. It is charged as it goes out: a
//! packet in fragments as these. The engine's own answers and relayed data are not.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{Direction, DropReason, segment::Segments, vm::VmFlags};

use crate::{datapath::Datapath, state::Core, vm::VmNet};

impl<D: Datapath> Core<D> {
    /// Charges a VM for what is about to be sent on, from it or to it, or says why that is dropped:
    /// what the programs would drop behind us too, but would not count as one packet.
    pub(crate) fn may_carry(
        &self,
        vm: &VmNet,
        direction: Direction,
        segments: Segments,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let live = self.datapath.vm(vm.row);
        let flags = live.map_or(0, |live| live.flags().load(Relaxed));
        if flags & VmFlags::FROZEN != 0 {
            return Err(DropReason::Frozen);
        }
        let limited = flags & VmFlags::LIMITED != 0;
        match self.datapath.rates(vm.row).filter(|_| limited) {
            Some(rates) => rates.take(direction, segments, now_ns),
            None => Ok(()),
        }
    }
}
