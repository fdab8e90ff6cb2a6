//! Puts programs on interfaces, and takes them off.
//!
//! # Theory of operation
//!
//! An attachment outlives its maker: it is a pin named `<program>-<ifindex>`. By tcx (Linux 6.6)
//! and XDP the pin is the link's, and replacing is a link update. By clsact there is no link: the
//! filter has a fixed priority and handle, so that anybody can replace or remove it, and the pin
//! (`<program>-<ifindex>-clsact`) is the program's, as a note that the filter is there.
//!
//! A link whose interface is gone stays pinned, defunct (its ifindex reads 0). Ifindexes come
//! again, so an attachment is looked at before it is trusted.

pub(crate) mod clsact;
pub(crate) mod link;

use std::{fs, os::fd::BorrowedFd};

use crate::{Error, Paths, Result, bpf, device::Device};

/// The programs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Program {
    /// TC ingress of a guest's TAP.
    GuestEgress,
    /// TC ingress of a guest's TAP, behind all others: drops.
    GuestShut,
    /// TC ingress of an uplink with L2 headers.
    UplinkIngress,
    /// TC ingress of an uplink without.
    UplinkIngressL3,
    /// TC ingress of the engine port.
    EnginePort,
    /// XDP: drops early.
    Guard,
}

impl Program {
    /// Every program.
    pub const ALL: [Self; 6] = [
        Self::GuestEgress,
        Self::GuestShut,
        Self::UplinkIngress,
        Self::UplinkIngressL3,
        Self::EnginePort,
        Self::Guard,
    ];

    /// The one for an uplink with or without L2 headers.
    pub const fn uplink(has_l2: bool) -> Self {
        if has_l2 {
            Self::UplinkIngress
        } else {
            Self::UplinkIngressL3
        }
    }

    /// Its name in the object, which is its pin's.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GuestEgress => "guest_egress",
            Self::GuestShut => "guest_shut",
            Self::UplinkIngress => "uplink_ingress",
            Self::UplinkIngressL3 => "uplink_ingress_l3",
            Self::EnginePort => "engine_port",
            Self::Guard => "guard",
        }
    }
}

/// How a TC program is attached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Hook {
    /// A link, first in the chain ([`Program::GuestShut`]: last); Linux 6.6.
    Tcx,
    /// A filter of the clsact qdisc.
    Clsact,
}

/// How an XDP program is attached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum XdpMode {
    /// In the driver, before an skb is made.
    Native,
    /// In the stack, for drivers without XDP.
    Generic,
}

/// How an attachment found in the pins is made.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AttachedBy {
    /// A pinned link: tcx, or XDP for [`Program::Guard`].
    Link,
    /// A clsact filter.
    Clsact,
}

/// An attachment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Attached {
    /// The program.
    pub program: Program,
    /// The interface.
    pub ifindex: u32,
    /// How.
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
            ifindex: ifindex.parse().ok()?,
            by,
        })
    }
}

/// The attachments that are pinned.
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

/// Whether every interface that was attached to is gone, an engine port's among them, as far as links
/// tell.
pub(crate) fn are_defunct(paths: &Paths) -> Result<bool> {
    let mut has_port = false;
    for attached in pinned(paths)? {
        match attached.by {
            AttachedBy::Link if link::target(&paths.pin(&attached.pin_name()))? != 0 => {
                return Ok(false);
            }
            AttachedBy::Link => has_port |= attached.program == Program::EnginePort,
            // Beside a link of the same interface.
            AttachedBy::Clsact if attached.program == Program::GuestShut => {}
            AttachedBy::Clsact => return Ok(false),
        }
    }
    Ok(has_port)
}

/// The number that the kernel knows a program by.
pub(crate) fn program_id(fd: BorrowedFd<'_>) -> Result<u32> {
    bpf::prog_info(fd)
        .map(|info| info.id)
        .map_err(Error::os("ask for a program's id"))
}

/// Names program and interface in an error of a system call.
pub(crate) fn explain(error: Error, program: Program, ifindex: u32) -> Error {
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
