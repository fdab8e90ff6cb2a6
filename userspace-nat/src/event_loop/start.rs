//! The start of an engine: the parts from which it is built.
use std::{collections::VecDeque, io, ops::RangeInclusive, os::fd::BorrowedFd};

use slipgate_abi::first_packet::RING_LEN;
use thiserror::Error;

use super::{
    Engine,
    activity::Activity,
    adopting::Walk,
    fairness::{MOST_WAITING, Waiting},
    first_packets::FirstPackets,
    listening::Listening,
    looking::Looking,
    reload::Reloading,
};
use crate::{
    clock::Clock,
    control::Status,
    datapath::Datapath,
    flow::Flows,
    name_gate::SharedJudge,
    nat_ports::PortPool,
    observe::Watch,
    poll::{Interest, Poller, Subsystem, Token},
    port::{Batch, FrameIo},
    record::{FlowLog, Losses},
    services::Services,
    state::Core,
};

/// Parts from which an engine is built.
#[derive(Debug)]
pub struct Parts<D, P, C> {
    /// The kernel's tables of flows and VMs.
    pub datapath: D,
    /// The engine port for frames.
    pub port: P,
    /// The monotonic and wall clocks.
    pub clock: C,
    /// The services: ARP, DHCP, DNS, relay.
    pub services: Services,
    /// The rules, shared with the DNS proxy among the services.
    pub judge: SharedJudge,
    /// Range of translated ports.
    pub nat_ports: RangeInclusive<u16>,
    /// The flow log that records are written to.
    pub log: FlowLog,
}

/// Error that stops the engine.
#[derive(Debug, Error)]
pub enum EngineError {
    /// Reading the port failed.
    #[error("reading the engine port failed; was the device removed?")]
    Port(#[source] io::Error),
    /// The channel to the broker ended.
    #[error("the channel to the broker ended; the engine stops with it")]
    Control(#[source] io::Error),
    /// Waiting for descriptors failed.
    #[error("waiting for descriptors failed")]
    Wait(#[source] io::Error),
    /// Reading the kernel's tables failed.
    #[error("reading the pinned flow map failed")]
    Adopt(#[source] io::Error),
}

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
    /// Creates an engine that knows no VM, and has yet to [`begin_adoption`](Self::begin_adoption) of the
    /// flows in the kernel.
    ///
    /// # Errors
    /// When the epoll set can't be made.
    pub fn new(parts: Parts<D, P, C>) -> Result<Self, EngineError> {
        let poller = match parts.port.set() {
            Some(set) => Poller::over(set),
            None => Poller::new().map_err(EngineError::Wait)?,
        };
        watch(&poller, parts.port.fd(), Subsystem::Port)?;
        let slots = parts.datapath.slots();
        let vms = parts.datapath.vms();
        let flows = Flows::new(slots, vms, PortPool::new(parts.nat_ports));
        let mut log = parts.log;
        log.set_instance(parts.datapath.instance());
        log.set_owner(parts.datapath.owner());
        let first_packets = FirstPackets::new(&parts.datapath);
        let most_waiting = match first_packets.is_there() {
            true => MOST_WAITING,
            false => MOST_WAITING - RING_LEN as u16,
        };
        let mut engine = Self {
            core: Core::new(parts.datapath, flows, parts.judge),
            port: parts.port,
            clock: parts.clock,
            services: parts.services,
            log,
            losses: Losses::default(),
            watch: Watch::default(),
            listening: Listening::default(),
            activity: Activity::default(),
            reloading: Reloading::default(),
            adopting: Walk::default(),
            poller,
            looking: Looking::default(),
            batch: Batch::keeping(most_waiting),
            ready: Vec::new(),
            waiting: Waiting::default(),
            first_packets,
            skipped_readings: 0,
            is_port_read: false,
            last_frame_ns: 0,
            next_scan_ns: 0,
            next_refusals_ns: 0,
            next_credits_ns: None,
            exit: None,
            ending: VecDeque::new(),
            next_token: 0,
            frames: Status::default(),
        };
        engine.keep_records();
        Ok(engine)
    }
}

/// Adds a descriptor, if there is one, to those that a turn waits for.
pub(super) fn watch(
    poller: &Poller,
    fd: Option<BorrowedFd<'_>>,
    subsystem: Subsystem,
) -> Result<(), EngineError> {
    let Some(fd) = fd else { return Ok(()) };
    let token = Token { subsystem, key: 0 };
    let added = poller.add(fd, token, Interest::Read);
    added.map_err(EngineError::Wait)
}
