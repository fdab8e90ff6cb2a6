//! Messages between broker and VMM.
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::{
    client::SnapshotBase,
    descriptors::{carries_descriptors, carries_none, maps_descriptors},
};

/// Message from the broker to the VMM.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToVmm<F = OwnedFd> {
    /// First message, sent before there is anything to make a machine of: the confinement, which the
    /// process enters at once.
    Confine(VmmJail),
    /// Second message: the machine to create.
    Start(Box<VmmStart<F>>),
    /// Sent when the TAP is served: run the guest.
    Go,
    /// Request for [`FromVmm::Counters`] with the same number.
    Counters {
        /// Returned with the answer.
        id: u64,
    },
    /// An order; answered by [`FromVmm::Carried`] with the same number. Orders are carried out one
    /// after the other.
    Order {
        /// Returned with the answer.
        id: u64,
        /// The order to carry out.
        order: VmmOrder<F>,
    },
    /// Nobody waits for the snapshot of this number any more: it is not finished, and the guest goes
    /// on. The order is answered all the same. Other orders, and those that are done, are not changed.
    Cancel {
        /// Number of the order.
        id: u64,
    },
    /// The answer to [`FromVmm::Reset`]: whether the machine begins anew, or ends.
    AfterReset {
        /// Whether it begins anew.
        begins: bool,
    },
    /// Stop the guest and send [`FromVmm::Ended`]. It does not wait for an order under way.
    Stop,
}

/// Order to a machine that runs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum VmmOrder<F = OwnedFd> {
    /// Pause the guest: its vCPUs stop between two instructions.
    Pause,
    /// Have it go on.
    Resume,
    /// Write a snapshot. A guest that runs is paused meanwhile.
    Snapshot(VmmSnapshot<F>),
    /// Ask the guest for so much of its memory in all.
    Balloon {
        /// How much, MiB.
        mib: u64,
    },
}

/// Files of a snapshot.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct VmmSnapshot<F = OwnedFd> {
    /// File for the machine's state.
    pub state: F,
    /// File for the guest's memory.
    pub memory: F,
    /// The files of its base, then of that one's, and so on: to read them. Of a snapshot that is written,
    /// those that it is to differ from.
    #[serde(default = "Vec::new")]
    pub bases: Vec<SnapshotBase<F>>,
}

/// Machine that the VMM creates.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct VmmStart<F = OwnedFd> {
    /// Open descriptor of `/dev/kvm`.
    pub kvm: F,
    /// Input of the guest's serial console.
    pub input: F,
    /// Output of the guest's serial console.
    pub output: F,
    /// The snapshot to go on from, in the place of a kernel.
    pub snapshot: Option<VmmSnapshot<F>>,
    /// The kernel's image; `None`: the built-in guest.
    pub kernel: Option<F>,
    /// The initial RAM disk.
    pub initrd: Option<F>,
    /// Disks, in the order in which the guest finds them.
    #[serde(default = "Vec::new")]
    pub disks: Vec<VmmDisk<F>>,
    /// Listening socket of the vsock device; `None`: there is none.
    pub vsock: Option<F>,
    /// The VMM's end of the socket for the guest's own requests ([`crate::vsock`]).
    pub vsock_requests: Option<F>,
    /// The guest's address on it.
    #[serde(default)]
    pub vsock_cid: u32,
    /// Memory that the guest is asked to give back at the beginning, MiB; `None`: there is no balloon.
    #[serde(default)]
    pub balloon_mib: Option<u64>,
    /// Most that passes its network card.
    #[serde(default)]
    pub net_rates: NetRates,
    /// The TAP's queues, one per pair.
    pub taps: Vec<F>,
    /// The file for the guest's memory, if another process serves the network card's rings: the one
    /// descriptor of `taps` is the stream socket to it then.
    pub shared: Option<F>,
    /// Whether the machine may begin anew when its guest resets it.
    #[serde(default)]
    pub may_restart: bool,
    /// Number of virtual CPUs.
    pub cpus: u8,
    /// Memory of the guest, bytes.
    pub memory_bytes: u64,
    /// Whether the memory is of huge pages.
    #[serde(default)]
    pub huge_pages: bool,
    /// CPU that the guest is told of.
    #[serde(default)]
    pub cpu_template: CpuTemplate,
    /// The kernel's command line.
    pub cmdline: String,
    /// The guest's MAC address.
    pub mac: [u8; 6],
    /// The TAP's MTU, L3 bytes.
    pub mtu: u16,
    /// Most bytes of the guest's that are written to its console, if that is a file.
    #[serde(default)]
    pub console_bytes: u64,
}

/// Confinement that the VMM enters before it is told of its machine.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VmmJail {
    /// Level of messages on stderr.
    pub log: String,
    /// Whether it is in a PID namespace of its own, and is to enter the others.
    pub in_namespaces: bool,
    /// Whether it is to fail where the host refuses one.
    pub required: bool,
}

/// A disk of the machine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct VmmDisk<F = OwnedFd> {
    /// Raw image or block device, locked by the broker.
    pub file: F,
    /// Whether the guest's writes are refused; the file is open for reading only then.
    pub read_only: bool,
    /// When the guest's writes become stable.
    #[serde(default)]
    pub cache: DiskCache,
    /// Most that its requests transfer.
    #[serde(default)]
    pub rate: RateLimit,
}

/// When what a guest writes to a disk is on the host's medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskCache {
    /// With the guest's next flush.
    #[default]
    WriteBack,
    /// Before each write is answered.
    WriteThrough,
    /// When the host likes: flushes are answered at once.
    Unsafe,
    /// With the guest's next flush; reads and writes pass the host's page cache by (O_DIRECT).
    None,
}

impl DiskCache {
    /// Returns whether it is [`DiskCache::WriteBack`], which need not be said.
    pub fn is_write_back(&self) -> bool {
        *self == Self::WriteBack
    }
}

/// CPU that a guest is told of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum CpuTemplate {
    /// That of the host.
    #[default]
    #[serde(rename = "host")]
    Host,
    /// One of the level x86-64-v1, the same on every host of a vendor.
    #[serde(rename = "x86-64-v1")]
    X86_64V1,
    /// One of the level x86-64-v2.
    #[serde(rename = "x86-64-v2")]
    X86_64V2,
    /// One of the level x86-64-v3.
    #[serde(rename = "x86-64-v3")]
    X86_64V3,
}

impl CpuTemplate {
    /// Returns whether it is the host's, which need not be said.
    pub fn is_host(&self) -> bool {
        *self == Self::Host
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::X86_64V1 => "x86-64-v1",
            Self::X86_64V2 => "x86-64-v2",
            Self::X86_64V3 => "x86-64-v3",
        }
    }
}

/// Rate limits of a network card.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetRates {
    /// Limits on frames from the guest.
    #[serde(default, skip_serializing_if = "RateLimit::is_none")]
    pub tx: RateLimit,
    /// Limits on frames to the guest.
    #[serde(default, skip_serializing_if = "RateLimit::is_none")]
    pub rx: RateLimit,
}

/// Rate limit of a device in one direction; `None` does not limit that measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimit {
    /// Bucket that limits bytes; `None` does not limit them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<TokenBucket>,
    /// Limit of operations: requests of a disk, packets of a network card.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations: Option<TokenBucket>,
}

/// Settings of a token bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenBucket {
    /// Most tokens that it holds.
    pub size: u64,
    /// Time in which an empty one becomes full, ms.
    pub refill_ms: u64,
    /// Tokens that are there once, at the beginning, besides.
    #[serde(default)]
    pub one_time_burst: u64,
}

impl RateLimit {
    /// Returns whether nothing is limited.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl NetRates {
    /// Returns whether nothing is limited.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Message from the VMM to the broker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FromVmm {
    /// The VMM is confined and the machine created; it waits for [`ToVmm::Go`].
    Ready(VmmTimes),
    /// The machine can't be created. The last message.
    Failed {
        /// Flag whose value is at fault, if one is.
        flag: Option<String>,
        /// Why not, in words.
        why: String,
    },
    /// The answer to [`ToVmm::Counters`].
    Counters {
        /// Number of the request.
        id: u64,
        /// Counters of the machine.
        counters: serde_json::Value,
    },
    /// The answer to [`ToVmm::Order`].
    Carried {
        /// Number of the order.
        id: u64,
        /// Why it was not carried out, in words.
        error: Option<String>,
    },
    /// The guest has reset the machine, which rests until [`ToVmm::AfterReset`]. Sent only where it
    /// may begin anew.
    Reset {
        /// Report of a triple fault, if that was the way.
        report: Option<String>,
    },
    /// The guest no longer runs. The last message.
    Ended(Box<VmmEnd>),
}

/// Duration of each step in making a machine.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct VmmTimes {
    /// From the process's first instruction of its own until it was confined, µs.
    pub confined_us: u64,
    /// From there until the machine was made and all its threads confined, µs.
    pub made_us: u64,
}

/// Outcome of a guest.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct VmmEnd {
    /// Reason for the end.
    pub outcome: GuestEnd,
    /// Counters of the machine when the guest ended.
    pub counters: serde_json::Value,
    /// Time from [`ToVmm::Go`] to the end, µs.
    pub ran_us: u64,
    /// Number of times that the machine began anew.
    #[serde(default)]
    pub restarts: u64,
    /// Time from [`ToVmm::Go`] to the end of the console's first line, µs.
    pub first_line_us: Option<u64>,
}

/// Reason why a guest ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "how")]
pub enum GuestEnd {
    /// The guest powered off.
    PoweredOff,
    /// The guest reset the machine.
    Reset,
    /// The guest wrote to the exit port.
    Exited {
        /// Value that the guest wrote there.
        status: u8,
    },
    /// The broker sent [`ToVmm::Stop`].
    Stopped,
    /// The guest can't continue.
    Crashed {
        /// Lines of text: the event, the registers, and a remedy.
        report: String,
    },
}

maps_descriptors!(enum ToVmm {
    Confine(jail), Start(start: boxed), Go, Counters { id }, Order { id, order: nested }, Cancel { id }, AfterReset { begins },
    Stop,
});
maps_descriptors!(enum VmmOrder { Pause, Resume, Snapshot(files: nested), Balloon { mib } });
maps_descriptors!(
    struct VmmSnapshot {
        state: fd,
        memory: fd,
        bases: each,
    }
);
maps_descriptors!(struct VmmStart {
    kvm: fd, input: fd, output: fd, snapshot: maybe, kernel: optional, initrd: optional, disks: each,
    vsock: optional, vsock_requests: optional,
    vsock_cid, balloon_mib, net_rates, taps: all, shared: optional, may_restart, cpus, memory_bytes, huge_pages, cpu_template, cmdline, mac, mtu, console_bytes,
});
maps_descriptors!(struct VmmDisk { file: fd, read_only, cache, rate });
carries_descriptors!(ToVmm);
carries_none!(FromVmm);
