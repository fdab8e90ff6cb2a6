//! Busy ports toward one destination. Most destinations have one flow, and few words for it.
use std::collections::VecDeque;

use slipgate_abi::VmId;

use super::occupancy::Occupancy;

/// Ports that are busy toward one destination; at least one, unless one is about to be added.
#[derive(Debug)]
pub(super) enum Busy {
    /// Only the port of this offset in the range, with its holder. It does not rest.
    One(u16, VmId),
    /// Several ports, as a bitmap that grows.
    Many(Box<Toward>),
}

/// Any number of ports that are busy toward one destination.
#[derive(Debug, Default)]
pub(super) struct Toward {
    pub(super) busy: Occupancy,
    /// Busy ports that rest after flows that were not inspected, oldest first.
    pub(super) resting: VecDeque<Rest>,
    /// Busy ports that rest after inspected flows, oldest first.
    pub(super) inspected: VecDeque<Rest>,
    /// Offset in the range at which the next search among busy ports starts.
    pub(super) looked_at: u16,
    /// Whether the host has refused a port, since a connection before was in TIME-WAIT.
    pub(super) has_waited: bool,
}

/// Rest of one port toward one destination.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest {
    pub(super) port: u16,
    /// Id of the VM that used the port, or [`super::NOBODY`].
    pub(super) vm: VmId,
    /// End of the rest, `CLOCK_MONOTONIC` ns. It also distinguishes the rests of one port.
    pub(super) ready_ns: u64,
    /// Time from which the same VM may reuse the port, ns; `u64::MAX`: not before the end, except
    /// for a SYN with timestamps.
    pub(super) early_ns: u64,
    /// Whether such a SYN is no exception.
    pub(super) is_firm: bool,
}

impl Rest {
    /// Whether this is the port's rest and the VM may end it early.
    pub(super) fn is_for(&self, port: u16, vm: VmId) -> bool {
        self.port == port && self.vm == vm && self.early_ns != u64::MAX
    }
}

impl Default for Busy {
    fn default() -> Self {
        Self::Many(Box::default())
    }
}

impl Toward {
    fn of_one(offset: u16, holder: VmId) -> Self {
        let mut toward = Self::default();
        toward.busy.set_first(offset, holder);
        toward
    }
}

impl Busy {
    /// Returns the number of busy ports, resting ones included.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::One(..) => 1,
            Self::Many(toward) => toward.busy.len(),
        }
    }

    /// Returns the number of ports of a holder.
    pub(super) fn held_by(&self, vm: VmId) -> usize {
        match self {
            Self::One(_, holder) => usize::from(*holder == vm),
            Self::Many(toward) => toward.busy.held_by(vm),
        }
    }

    /// Whether the host has refused a port, since a connection before was in TIME-WAIT.
    pub(super) fn has_waited(&self) -> bool {
        match self {
            Self::One(..) => false,
            Self::Many(toward) => toward.has_waited,
        }
    }

    /// Returns the ports, if there may be more than one, or resting ones.
    pub(super) fn many(&self) -> Option<&Toward> {
        match self {
            Self::One(..) => None,
            Self::Many(toward) => Some(toward),
        }
    }

    /// Returns the ports. `one` has room for them if they are not kept like this.
    pub(super) fn view<'a>(&'a self, one: &'a mut Toward) -> &'a Toward {
        match self {
            Self::One(offset, holder) => {
                *one = Toward::of_one(*offset, *holder);
                one
            }
            Self::Many(toward) => toward,
        }
    }

    /// Returns the ports, which may become any number from now on.
    pub(super) fn whole(&mut self) -> &mut Toward {
        if let Self::One(offset, holder) = *self {
            *self = Self::Many(Box::new(Toward::of_one(offset, holder)));
        }
        match self {
            Self::Many(toward) => toward,
            Self::One(..) => unreachable!("it was just made many"),
        }
    }

    /// Frees a port of a holder. Returns whether no port is left.
    pub(super) fn clear(&mut self, offset: usize, holder: VmId) -> bool {
        match self {
            Self::One(one, _) => usize::from(*one) == offset,
            Self::Many(toward) => {
                toward.busy.clear(offset, holder);
                toward.busy.len() == 0
            }
        }
    }
}
