//! What an engine is made of, and why it stops working.
use std::{io, ops::RangeInclusive};

use thiserror::Error;

use crate::{name_gate::SharedJudge, record::FlowLog};

/// What an engine is made of.
#[derive(Debug)]
pub struct Parts<D, P, C, K, S> {
    /// The kernel's tables.
    pub datapath: D,
    /// The engine port.
    pub port: P,
    /// Time.
    pub clock: C,
    /// The broker.
    pub control: K,
    /// ARP, DHCP, DNS, relays.
    pub services: S,
    /// The rules, shared with the DNS proxy among the services.
    pub judge: SharedJudge,
    /// The first element of `RULES` that is ours.
    pub rule_base: u32,
    /// Translated ports.
    pub nat_ports: RangeInclusive<u16>,
    /// The flow log.
    pub log: FlowLog,
}

/// Why the engine stopped working.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The port can't be read.
    #[error("reading the engine port failed; was the device removed?")]
    Port(#[source] io::Error),
    /// The broker is gone.
    #[error("the channel to the broker ended; the engine stops with it")]
    Control(#[source] io::Error),
    /// Waiting failed.
    #[error("waiting for descriptors failed")]
    Wait(#[source] io::Error),
    /// The kernel's tables can't be read.
    #[error("reading the pinned flow map failed")]
    Adopt(#[source] io::Error),
}
