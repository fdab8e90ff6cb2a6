//! Expected results and counts of a run.
use slipgate_abi::{Counter, DropReason, Handover, PortHeader};

use crate::{datapath::*, frame::handed};

impl Loaded {
    /// Returns the drop counters of a row that are not zero.
    pub(crate) fn drops_of(&self, row: u32) -> Vec<(DropReason, Counter)> {
        let row = self.drops.get(row);
        DropReason::ALL
            .iter()
            .map(|&reason| (reason, row.get(reason)))
            .filter(|(_, counter)| *counter != Counter::default())
            .collect()
    }

    /// Returns the only reason for which a row's packets were dropped.
    #[track_caller]
    pub(crate) fn only_reason(&self, row: u32) -> DropReason {
        match self.drops_of(row)[..] {
            [(reason, _)] => reason,
            ref drops => panic!("not one reason: {drops:?}"),
        }
    }

    /// Removes a flow's tuples from `FLOWS`.
    pub(crate) fn forget(&mut self, slot: u32) {
        let slot = self.slot(slot);
        let mut flows = self.flows();
        flows.remove(&slot.guest_tuple()).expect("guest");
        flows.remove(&slot.world_tuple()).expect("world");
    }

    /// Returns the only drop of a row since its creation.
    pub(crate) fn only_drop(&self, row: u32) -> DropReason {
        match self.drops_of(row)[..] {
            [(reason, Counter { packets: 1, .. })] => reason,
            ref drops => panic!("not one drop: {drops:?}"),
        }
    }

    /// Runs a program and expects one drop in a row, with the frame's L3 bytes, and nothing else.
    #[track_caller]
    pub(crate) fn expect_drop(&self, program: &str, frame: &[u8], row: u32, reason: DropReason) {
        let before = self.tally();
        let run = self.run(program, frame);
        let dropped = self.drops.get(row).get(reason);
        assert_eq!(run.action, SHOT, "{reason:?} {:?}", self.drops_of(row));
        assert_eq!(dropped.packets, 1, "{reason:?} {:?}", self.drops_of(row));
        let bytes = dropped.bytes as usize;
        assert!(
            bytes + 14 <= frame.len() && (bytes + 14 == frame.len() || frame.len() <= 64),
            "{bytes}"
        );
        assert_eq!(self.tally() - before, 1);
    }

    /// Runs a program and expects the frame to be handed over unchanged.
    #[track_caller]
    pub(crate) fn expect_handover(&self, program: &str, frame: &[u8], why: Handover, flags: u8) {
        let before = self.tally();
        let run = self.run(program, frame);
        assert_eq!(run.action, REDIRECT, "{why:?} {:?}", self.drops_of(ROW));
        let (header, rest) = handed(&run.frame);
        let expected = PortHeader {
            code: why as u8,
            flags,
            vm_row: ROW as u16,
            id: VM,
        };
        assert_eq!(header, expected, "{why:?}");
        assert_eq!(rest, &frame[12..], "{why:?}");
        assert_eq!(self.handed_over(), 1);
        assert_eq!(self.tally() - before, 1);
    }

    /// Runs a program and expects it to leave the frame to the host.
    #[track_caller]
    pub(crate) fn expect_unnoticed(&self, program: &str, frame: &[u8]) {
        let before = self.tally();
        let run = self.run(program, frame);
        assert_eq!(run.action, UNSPEC, "{:?}", self.drops_of(ROW));
        assert_eq!(run.frame, frame);
        assert_eq!(self.tally(), before);
    }

    /// Returns the number of packets counted anywhere: in a flow, as a drop, as handed over, or as
    /// answered.
    pub(crate) fn tally(&self) -> u64 {
        let drops: u64 = [0, ROW]
            .iter()
            .flat_map(|&row| self.drops_of(row))
            .map(|(_, counter)| counter.packets)
            .sum();
        let flows: u64 = (0..16)
            .map(|slot| self.slots.get(slot))
            .map(|slot| slot.tx_packets + slot.rx_packets)
            .sum();
        let vm = self.vms.get(ROW);
        let answered = vm.arp_answered + self.vms6.get(ROW).neighbours_answered;
        drops + flows + vm.handed_over + vm.world_handed_over + answered
    }

    pub(crate) fn handed_over(&self) -> u64 {
        let vm = self.vms.get(ROW);
        vm.handed_over + vm.world_handed_over
    }
}
