//! The broker's end of the engine: a channel whose messages call the engine's methods.
use std::{io, net::SocketAddr, os::fd::BorrowedFd};

use slipgate_abi::{Protocol, VmId, VmRow};
use slipgate_model::{Silence, SleepChange};
use slipgate_policy::{LocalAddresses, Policy};

use crate::{relay, vm::VmSpec};

pub(crate) mod why;

pub use crate::state::Forward;

/// The non-blocking channel by which an engine `E` is commanded.
pub trait Control<E> {
    /// Handles the waiting messages: calls the engine's methods, and sends what they return.
    ///
    /// # Errors
    /// Any error, including the end of the channel. It stops the engine, which must not run without
    /// its broker.
    fn serve(&mut self, engine: &mut E) -> io::Result<()>;
    /// Sends the answer that waited for [`Engine::after_ends`](crate::event_loop::Engine::after_ends).
    ///
    /// # Errors
    /// When the channel is closed or does not take the message.
    fn ended(&mut self, token: EndsToken) -> io::Result<()>;
    /// Sends the result of a reload, once [`Reloaded::ends`] has ended.
    ///
    /// # Errors
    /// When the channel is closed or does not take the message.
    fn reloaded(&mut self, reloaded: Reloaded) -> io::Result<()>;
    /// Says which VMs are idle, and which are not any more.
    ///
    /// # Errors
    /// When the channel is closed or does not take the message.
    fn activity(&mut self, changes: ActivityChanges) -> io::Result<()>;
    /// Says what became of VMs that sleep, in its order.
    ///
    /// # Errors
    /// When the channel is closed or does not take the message.
    fn sleep_changes(&mut self, changes: Vec<(VmId, SleepChange)>) -> io::Result<()>;
    /// Descriptor for the epoll set; `None` for implementations without one, in tests.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
}

/// VMs whose state has changed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ActivityChanges {
    /// VMs that are idle now.
    pub idle: Vec<(VmId, Silence)>,
    /// VMs that are not idle any more.
    pub busy: Vec<(VmId, Silence)>,
}

impl ActivityChanges {
    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.idle.is_empty() && self.busy.is_empty()
    }
}

/// Token for the flows that had begun to end at one time; it is answered when all of them have
/// ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct EndsToken(pub(crate) u64);

/// Result of a cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// Number of flows that end.
    pub flows: u64,
    /// Token for the end of these flows. After it, none of their packets can leave any more.
    pub ends: EndsToken,
}

/// Result of a [`Reload`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reloaded {
    /// Number of the [`Reload`].
    pub id: u64,
    /// Number of flows that were cut.
    pub cut: u64,
    /// Number of flows that live on.
    pub kept: u64,
    /// Number of flows among `kept` that the new policies would refuse.
    pub left: u64,
    /// Token for the end of the cut flows. After it, no packet of a flow that the policies deny can
    /// leave any more.
    pub ends: EndsToken,
}

/// Forwards of a VM that are no longer in force, and new ones.
#[derive(Debug)]
pub struct ForwardChange {
    /// Id of the VM.
    pub vm: VmId,
    /// Row of the VM.
    pub row: VmRow,
    /// Protocol and address on the host of those that go.
    pub removed: Vec<(Protocol, SocketAddr)>,
    /// Those that come, as the kernel translates them and as they are relayed, if they are.
    pub added: Vec<(Forward, Option<relay::Forward>)>,
}

/// Policies and VMs that replace present ones.
#[derive(Debug)]
pub struct Reload {
    /// Number that the result has.
    pub id: u64,
    /// The compiled policies that are new or changed, by their indexes; `None`: it is removed. Each
    /// is numbered by its elements of `RULES`.
    pub policies: Vec<(u32, Option<Policy>)>,
    /// Addresses of this host that the rules protect.
    pub local: LocalAddresses,
    /// Every VM that has one of these policies, had one, or gets another one.
    pub vms: Vec<VmSpec>,
    /// Ids of VMs that keep no denied flow, whatever their policy says about live flows.
    pub strictly: Vec<VmId>,
}

/// Counters and sizes of the engine, for tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Status {
    /// Flow slots of this engine that are in use.
    pub flows: u64,
    /// Flow records that were written.
    pub records_written: u64,
    /// Flow records that were lost because writing failed.
    pub records_lost: u64,
    /// Destinations toward which a translated port is busy.
    pub port_destinations: u64,
    /// Translated ports that rest before they are used again.
    pub ports_resting: u64,
    /// Frames that were read from the port.
    pub frames_read: u64,
    /// Frames among those that were returned to the kernel to be translated.
    pub frames_returned: u64,
    /// Frames among those that were dropped, and counted by reason.
    pub frames_dropped: u64,
    /// Frames among those that a service consumed.
    pub frames_consumed: u64,
    /// Frames that the port did not accept, of any origin.
    pub frames_unsent: u64,
}
