//! A VM's rates, for the packets that the engine itself sends on.
//!
//! Each packet is charged once, where it is sent on for the last time. The programs charge the
//! packets that they translate, whether or not these came through the engine before. The engine
//! charges the packets that it translates and sends unchanged: fragments and ICMP errors. Charged
//! is what is sent: a packet in fragments as these. The engine's own answers and relayed data are
//! not charged.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{Direction, DropReason, segment::Segments, vm::VmFlags};

use crate::{datapath::Datapath, state::Core, vm::VmNet};

impl<D: Datapath> Core<D> {
    /// Charges a VM for packets that are about to be sent on, from it or to it.
    ///
    /// # Errors
    /// Returns the reason to drop them. The programs would drop them later too, but would not count
    /// them as one packet.
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
