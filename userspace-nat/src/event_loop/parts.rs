//! Parts from which an engine is built, and the errors that stop it.
use std::{io, ops::RangeInclusive};

use thiserror::Error;

use crate::{name_gate::SharedJudge, record::FlowLog};

/// Parts from which an engine is built.
#[derive(Debug)]
pub struct Parts<D, P, C, S> {
    /// The kernel's tables of flows and VMs.
    pub datapath: D,
    /// The engine port for frames.
    pub port: P,
    /// The monotonic and wall clocks.
    pub clock: C,
    /// The services: ARP, DHCP, DNS, relay.
    pub services: S,
    /// The rules, shared with the DNS proxy among the services.
    pub judge: SharedJudge,
    /// First element of `RULES` that belongs to this process.
    pub rule_base: u32,
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
