//! Starts and ends of relayed flows, until the engine writes them down.
use std::{collections::VecDeque, net::SocketAddrV4};

use slipgate_abi::Protocol;

use crate::{
    record::{RelayedEnd, RelayedFlow},
    stats::{Tally, VmStats},
};

/// Records that wait at most: a turn of the loop makes far fewer.
const MOST_WAITING: usize = 16_384;

/// The records not fetched yet. Closed, it takes none.
#[derive(Debug, Default)]
pub(super) struct Journal {
    open: bool,
    number: u64,
    records: VecDeque<(RelayedFlow, Option<RelayedEnd>)>,
}

/// Who talks to whom.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) vm: u32,
    pub(super) protocol: Protocol,
    pub(super) guest: SocketAddrV4,
    pub(super) remote: SocketAddrV4,
    /// For a forward: the host's address, and the rule.
    pub(super) forward: Option<(SocketAddrV4, u32)>,
}

impl Journal {
    pub(super) fn open(&mut self) {
        self.open = true;
    }

    pub(super) fn next(&mut self) -> Option<(RelayedFlow, Option<RelayedEnd>)> {
        self.records.pop_front()
    }

    /// A flow that begins now.
    pub(super) fn begin(&mut self, ends: Ends, stats: VmStats, now_ns: u64) -> RelayedFlow {
        self.number += 1;
        let flow = RelayedFlow {
            number: self.number,
            vm: ends.vm,
            protocol: ends.protocol,
            guest: ends.guest,
            remote: ends.remote,
            nat: ends.forward.map(|(host, _)| host),
            rule: ends.forward.map(|(_, rule)| rule),
            opened_ns: now_ns,
            connect_us: 0,
            tx: (0, 0),
            rx: (0, 0),
        };
        self.put(flow, None, stats);
        flow
    }

    /// A flow that has ended, for a reason as records name it.
    pub(super) fn end(
        &mut self,
        flow: &RelayedFlow,
        reason: &'static str,
        stats: VmStats,
        at_ns: u64,
    ) {
        self.put(*flow, Some(RelayedEnd { reason, at_ns }), stats);
    }

    fn put(&mut self, flow: RelayedFlow, end: Option<RelayedEnd>, stats: VmStats) {
        if !self.open {
            return;
        }
        if self.records.len() >= MOST_WAITING {
            stats.tally(Tally::RecordLost, 1);
            return;
        }
        self.records.push_back((flow, end));
    }
}
