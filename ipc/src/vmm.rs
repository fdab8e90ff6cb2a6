//! Messages between broker and VMM.
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::descriptors::{carries_descriptors, carries_none, try_map_all};

/// From the broker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToVmm<F = OwnedFd> {
    /// First: the machine to make.
    Start(Box<VmmStart<F>>),
    /// The TAP is served: let the guest run.
    Go,
    /// Send [`FromVmm::Counters`] with the same number.
    Counters {
        /// Returned with the answer.
        id: u64,
    },
    /// Stop the guest, and say [`FromVmm::Ended`].
    Stop,
}

/// The machine to make.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct VmmStart<F = OwnedFd> {
    /// KVM.
    pub kvm: F,
    /// The console's input.
    pub input: F,
    /// The console's output.
    pub output: F,
    /// The kernel's image; `None`: the built-in guest.
    pub kernel: Option<F>,
    /// The initial RAM disk.
    pub initrd: Option<F>,
    /// The TAP's queues, one per pair.
    pub taps: Vec<F>,
    /// Virtual CPUs.
    pub cpus: u8,
    /// The guest's memory.
    pub memory_bytes: u64,
    /// The kernel's command line.
    pub cmdline: String,
    /// The guest's MAC address.
    pub mac: [u8; 6],
    /// The TAP's MTU, L3 bytes.
    pub mtu: u16,
    /// Level of messages on stderr.
    pub log: String,
}

/// From the VMM.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FromVmm {
    /// Confined; the machine is made, and waits for [`ToVmm::Go`].
    Ready,
    /// The machine can't be made. The last message.
    Failed {
        /// The flag whose value it can't be made of, if it is one's.
        flag: Option<String>,
        /// Why not, in words.
        why: String,
    },
    /// The answer to [`ToVmm::Counters`].
    Counters {
        /// The request's.
        id: u64,
        /// The machine's counters.
        counters: serde_json::Value,
    },
    /// The guest runs no more. The last message.
    Ended(Box<VmmEnd>),
}

/// How a guest ended.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct VmmEnd {
    /// What ended it.
    pub outcome: GuestEnd,
    /// The machine's last counters.
    pub counters: serde_json::Value,
    /// From Go to the end, µs.
    pub ran_us: u64,
    /// From Go to the end of the console's first line, µs.
    pub first_line_us: Option<u64>,
}

/// What ended a guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "how")]
pub enum GuestEnd {
    /// It powered off.
    PoweredOff,
    /// It reset itself.
    Reset,
    /// It ended by the exit port.
    Exited {
        /// What it wrote there.
        status: u8,
    },
    /// As asked by [`ToVmm::Stop`].
    Stopped,
    /// It can't go on.
    Crashed {
        /// What happened, registers, what to do; lines.
        report: String,
    },
}

impl<F> ToVmm<F> {
    fn try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>) -> Result<ToVmm<G>, E> {
        Ok(match self {
            Self::Start(start) => ToVmm::Start(Box::new(start.try_map(f)?)),
            Self::Go => ToVmm::Go,
            Self::Counters { id } => ToVmm::Counters { id },
            Self::Stop => ToVmm::Stop,
        })
    }
}

impl<F> VmmStart<F> {
    fn try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>) -> Result<VmmStart<G>, E> {
        Ok(VmmStart {
            kvm: f(self.kvm)?,
            input: f(self.input)?,
            output: f(self.output)?,
            kernel: self.kernel.map(&mut *f).transpose()?,
            initrd: self.initrd.map(&mut *f).transpose()?,
            taps: try_map_all(self.taps, f)?,
            cpus: self.cpus,
            memory_bytes: self.memory_bytes,
            cmdline: self.cmdline,
            mac: self.mac,
            mtu: self.mtu,
            log: self.log,
        })
    }
}

carries_descriptors!(ToVmm);
carries_none!(FromVmm);
