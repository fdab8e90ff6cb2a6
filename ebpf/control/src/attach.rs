//! Attachment of programs to interfaces.
//!
//! # Theory of operation
//!
//! An attachment outlives the process that made it: it is a pin named `<program>-<ifindex>`. With
//! tcx (Linux 6.6) and XDP the pin is that of the link, and a replacement is a link update. With
//! clsact there is no link: the filter has a fixed priority and handle, so that any process can
//! replace or remove it, and the pin (`<program>-<ifindex>-clsact`) is that of the program, as a
//! record of the filter.
//!
//! A link whose interface is gone stays pinned, defunct (its ifindex reads 0). Ifindexes are
//! reused, so an attachment is verified before it is trusted.

pub mod chain;
pub(crate) mod clsact;
pub(crate) mod link;
pub mod watch;

use std::{
    fs,
    os::fd::{BorrowedFd, OwnedFd},
    path::Path,
};

use slipgate_abi::IfIndex;

use crate::{Error, Paths, Result, bpf, device::Device};

/// Name of the array of programs by which the twins call, and of its pin.
pub(crate) const TWINS: &str = "TWINS";

/// A BPF program of slipgate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Program {
    /// TC ingress of a guest's TAP: handles the packets that the guest sends.
    GuestEgress,
    /// Fallback at TC ingress of a guest's TAP, last in order: drops everything if `guest_egress`
    /// was detached.
    GuestShut,
    /// TC ingress of an uplink with L2 headers.
    UplinkIngress,
    /// TC ingress of an uplink without L2 headers.
    UplinkIngressL3,
    /// TC ingress of the engine port.
    EnginePort,
    /// TC ingress of the pacing device's far end.
    Pacer,
    /// XDP: drops packets from the uplink early.
    Guard,
}

impl Program {
    /// Every program, in the order of declaration.
    pub const ALL: [Self; 7] = [
        Self::GuestEgress,
        Self::GuestShut,
        Self::UplinkIngress,
        Self::UplinkIngressL3,
        Self::EnginePort,
        Self::Pacer,
        Self::Guard,
    ];

    /// Returns the program for an uplink with or without L2 headers.
    pub const fn uplink(has_l2: bool) -> Self {
        if has_l2 {
            Self::UplinkIngress
        } else {
            Self::UplinkIngressL3
        }
    }

    /// Returns the program's name in the object, which is also its pin's.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GuestEgress => "guest_egress",
            Self::GuestShut => "guest_shut",
            Self::UplinkIngress => "uplink_ingress",
            Self::UplinkIngressL3 => "uplink_ingress_l3",
            Self::EnginePort => "engine_port",
            Self::Pacer => "pacer",
            Self::Guard => "guard",
        }
    }

    /// Returns the name of the program's twin, which calls it, and of its pin; `None` if it has none,
    /// because its place in a chain of programs does not matter ([`chain`]).
    pub const fn twin_name(self) -> Option<&'static str> {
        match self {
            Self::GuestEgress => Some("guest_egress_twin"),
            Self::UplinkIngress => Some("uplink_ingress_twin"),
            Self::UplinkIngressL3 => Some("uplink_ingress_l3_twin"),
            Self::GuestShut | Self::EnginePort | Self::Pacer | Self::Guard => None,
        }
    }

    /// Opens the program that is pinned in this directory.
    ///
    /// # Errors
    /// It is not there, or may not be opened.
    pub fn open_pinned(self, pin_dir: &Path) -> Result<OwnedFd> {
        let pin = pin_dir.join(self.name());
        bpf::obj_get(&pin).map_err(Error::os(format!("open the pinned {}", pin.display())))
    }
}

/// How a TC program is attached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Hook {
    /// A tcx link, first in the chain ([`Program::GuestShut`]: last); Linux 6.6.
    Tcx,
    /// A filter of the clsact qdisc: on older kernels, and where it must be made and removed fast.
    Clsact,
}

/// How an XDP program is attached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum XdpMode {
    /// In the driver, before an skb is allocated.
    Native,
    /// In the network stack, for drivers without XDP.
    Generic,
}

/// Kind of a pinned attachment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AttachedBy {
    /// A pinned link: tcx, or XDP for [`Program::Guard`].
    Link,
    /// A filter of the clsact qdisc.
    Clsact,
}

/// An attachment of a program to an interface.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Attached {
    /// Program that is attached.
    pub program: Program,
    /// Index of the interface.
    pub ifindex: IfIndex,
    /// Kind of the attachment.
    pub by: AttachedBy,
}

const CLSACT_SUFFIX: &str = "clsact";

impl Attached {
    pub(crate) fn pin_name(self) -> String {
        let link = format!("{}-{}", self.program.name(), self.ifindex);
        match self.by {
            AttachedBy::Link => link,
            AttachedBy::Clsact => format!("{link}-{CLSACT_SUFFIX}"),
        }
    }

    fn from_pin_name(name: &str) -> Option<Self> {
        let (program, rest) = name.split_once('-')?;
        let program = Program::ALL.into_iter().find(|p| p.name() == program)?;
        let (ifindex, by) = match rest.split_once('-') {
            None => (rest, AttachedBy::Link),
            Some((ifindex, CLSACT_SUFFIX)) => (ifindex, AttachedBy::Clsact),
            Some(_) => return None,
        };
        Some(Self {
            program,
            ifindex: IfIndex::new(ifindex.parse().ok()?),
            by,
        })
    }
}

/// Returns the pinned attachments.
pub(crate) fn pinned(paths: &Paths) -> Result<Vec<Attached>> {
    let dir = &paths.pin_dir;
    let failed = || Error::os(format!("list {}", dir.display()));
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed())? {
        let name = entry.map_err(failed())?.file_name();
        all.extend(name.to_str().and_then(Attached::from_pin_name));
    }
    Ok(all)
}

/// Whether every interface with a link is gone, an engine port's among them. A clsact filter tells
/// nothing of its interface, but the engine port has a link wherever the kernel has any: it ends
/// with the namespace, as the interfaces of filters do.
pub(crate) fn are_defunct(paths: &Paths) -> Result<bool> {
    let mut has_port = false;
    for attached in pinned(paths)? {
        if attached.by == AttachedBy::Clsact {
            continue;
        }
        if link::target(&paths.pin(&attached.pin_name()))?.is_some() {
            return Ok(false);
        }
        has_port |= attached.program == Program::EnginePort;
    }
    Ok(has_port)
}

/// Returns the kernel's id of a program.
pub(crate) fn program_id(fd: BorrowedFd<'_>) -> Result<u32> {
    bpf::prog_info(fd)
        .map(|info| info.id)
        .map_err(Error::os("ask for a program's id"))
}

/// Adds the program and the interface to an error of a system call.
pub(crate) fn explain(error: Error, program: Program, ifindex: IfIndex) -> Error {
    let name = Device::with_index(ifindex).map_or_else(
        |_| format!("ifindex {ifindex} (gone)"),
        |device| device.name().to_owned(),
    );
    match error {
        Error::Os { what, answer } => Error::Os {
            what: format!("attach {} to {name}: {what}", program.name()),
            answer,
        },
        other => other,
    }
}

#[cfg(test)]
#[path = "attach_test.rs"]
mod tests;

#[cfg(test)]
#[path = "attach/replace_test.rs"]
mod replace_tests;
