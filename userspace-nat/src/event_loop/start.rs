//! The start of an engine: the parts from which it is built, and the adoption of its predecessor's
//! flows. [`crate::flow::adopt`] has the cases of the latter.
use std::{collections::VecDeque, io, ops::RangeInclusive, os::fd::BorrowedFd};

use hashbrown::HashSet;
use slipgate_abi::{RuleIndex, SlotIndex, VmId, VmRow};
use slipgate_model::TranslatedId;
use thiserror::Error;

use super::{Engine, activity::Activity, fairness, listening::Listening, reload::Reloading};
use crate::{
    admission::rejudge::judge_again,
    clock::Clock,
    control::Status,
    datapath::Datapath,
    flow::{
        EndReason, Flows,
        adopt::{Adoption, Known},
    },
    name_gate::SharedJudge,
    nat_ports::PortPool,
    observe::Watch,
    poll::{Interest, Poller, Subsystem, Token},
    port::{Batch, FrameIo},
    record::{FlowLog, Losses},
    relay::Standing,
    services::Services,
    state::{Core, Nat},
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
    /// First element of `RULES` that belongs to this process.
    pub rule_base: RuleIndex,
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
    /// Creates an engine that knows no VM, and has yet to [`adopt`](Self::adopt) the flows in the
    /// kernel.
    ///
    /// # Errors
    /// When the epoll set can't be made.
    pub fn new(parts: Parts<D, P, C>) -> Result<Self, EngineError> {
        let poller = Poller::new().map_err(EngineError::Wait)?;
        watch(&poller, parts.port.fd(), Subsystem::Port)?;
        let slots = parts.datapath.slots();
        let flows = Flows::new(slots, PortPool::new(parts.nat_ports));
        let mut log = parts.log;
        log.set_instance(parts.datapath.instance());
        log.set_owner(parts.datapath.owner());
        let mut engine = Self {
            core: Core::new(parts.datapath, flows, parts.judge, parts.rule_base),
            port: parts.port,
            clock: parts.clock,
            services: parts.services,
            log,
            losses: Losses::default(),
            watch: Watch::default(),
            listening: Listening::default(),
            activity: Activity::default(),
            reloading: Reloading::default(),
            poller,
            batch: Batch::new(),
            ready: Vec::new(),
            order: fairness::Order::default(),
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

    /// Adopts the flows of a predecessor in the kernel, as far as present VMs, rules and routes
    /// admit them: these are to be set before. `recorded`: ids in the flow log's tail.
    ///
    /// # Errors
    /// When the flow map can't be read.
    pub fn adopt(&mut self, recorded: &HashSet<TranslatedId>) -> Result<Adoption, EngineError> {
        struct Here<'a> {
            vms: HashSet<(VmRow, VmId)>,
            recorded: &'a HashSet<TranslatedId>,
            instance: u32,
        }
        impl Known for Here<'_> {
            fn is_vm(&self, row: VmRow, vm: VmId) -> bool {
                self.vms.contains(&(row, vm))
            }
            fn is_recorded(&self, slot: SlotIndex, generation: u32) -> bool {
                self.recorded.contains(&TranslatedId {
                    instance: self.instance,
                    slot,
                    generation,
                })
            }
        }
        let now_ns = self.clock.now_ns();
        let vms = self
            .core
            .vms
            .iter()
            .map(|vm| (vm.net.row, vm.net.id))
            .collect();
        let here = Here {
            vms,
            recorded,
            instance: self.core.nat.datapath.instance(),
        };
        let mut ended = Vec::new();
        let Nat {
            flows, datapath, ..
        } = &mut self.core.nat;
        let mut adoption = flows
            .adopt(datapath, now_ns, &here, &mut |e| ended.push(*e))
            .map_err(EngineError::Adopt)?;
        self.record(&ended);
        self.flush_log();
        let core = &mut self.core;
        let (map, vms) = (&mut core.nat.datapath, core.vms.len());
        adoption.reopened = core.rules.reopen(map, vms, now_ns);
        // Changes while no engine was running.
        core.nat.follow_at_once(now_ns);
        let mut refused = core.nat.flows.all();
        refused.retain(|slot| judge_again(core, *slot, now_ns, |_| false) == Some(Standing::Cut));
        adoption.refused = self.cut_slots(&refused, EndReason::Policy);
        adoption.uninspected = self.core.end_uninspected(now_ns);
        // Counted now, since a flow that was about to end may have been refused as well.
        adoption.live = self.core.nat.flows.live();
        let Nat {
            flows, datapath, ..
        } = &mut self.core.nat;
        flows.release_captured(datapath);
        self.free_recorded(now_ns);
        Ok(adoption)
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
