//! What broker and VMM say to each other.
use serde::{Deserialize, Serialize};

/// From the broker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum ToVmm {
    /// First. Descriptors: as [`VmmStart`] says.
    Start(Box<VmmStart>),
    /// The TAP is served: let the guest run.
    Go,
    /// Send [`FromVmm::Counters`] with the same number.
    Counters { request: u64 },
    /// Stop the guest, and say [`FromVmm::Ended`].
    Stop,
}

/// The machine to make. Descriptors with it: KVM, the console's input and output, the kernel and
/// the initial RAM disk when there are such, then the TAP's queues, one per pair.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct VmmStart {
    pub(crate) cpus: u8,
    pub(crate) memory_bytes: u64,
    /// Whether there is a kernel; else it is the built-in guest.
    pub(crate) kernel: bool,
    pub(crate) initrd: bool,
    pub(crate) cmdline: String,
    pub(crate) mac: [u8; 6],
    /// The TAP's, L3 bytes.
    pub(crate) mtu: u16,
    /// Level of messages on stderr.
    pub(crate) log: String,
}

/// From the VMM.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum FromVmm {
    /// Confined; the machine is made, and waits for [`ToVmm::Go`].
    Ready,
    /// The machine can't be made, by which flag if by one, and why. The last message.
    Failed { flag: Option<String>, why: String },
    /// The answer to [`ToVmm::Counters`].
    Counters {
        request: u64,
        counters: serde_json::Value,
    },
    /// The guest runs no more. The last message.
    Ended(Box<VmmEnd>),
}

/// How a guest ended.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct VmmEnd {
    pub(crate) outcome: GuestEnd,
    /// The machine's last ones.
    pub(crate) counters: serde_json::Value,
    /// From Go to the end, µs.
    pub(crate) ran_us: u64,
    /// From Go to the end of the console's first line, µs.
    pub(crate) first_line_us: Option<u64>,
}

/// Why it ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "how")]
pub(crate) enum GuestEnd {
    PoweredOff,
    Reset,
    Exited {
        status: u8,
    },
    /// As asked by [`ToVmm::Stop`].
    Stopped,
    Crashed {
        /// What happened, registers, what to do; lines.
        report: String,
    },
}
