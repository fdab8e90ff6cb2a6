//! What can go wrong: what was tried, on what, and what to do about it.

use std::{io, path::PathBuf};

/// This crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// This crate's error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("can't {what}: {answer}{}", hint(.answer))]
    Os {
        /// What was tried, on what.
        what: String,
        /// The kernel's.
        answer: io::Error,
    },
    /// Pins can't be where they are to be.
    #[error(
        "{dir} is not on a bpffs: give a --pin-dir that is, such as below {bpffs}",
        bpffs = crate::bpf::BPFFS
    )]
    NotBpffs {
        /// Where they were to be.
        dir: PathBuf,
    },
    /// Pinned state was made by a build with another ABI.
    #[error(
        "the maps pinned in {pin_dir} have ABI version {theirs}, this slipgate has {ours}: \
         run the slipgate that made them, or stop it with `--on-exit detach` (its flows end)"
    )]
    AbiVersion {
        /// Where it is.
        pin_dir: PathBuf,
        /// Version found.
        theirs: u32,
        /// [`slipgate_abi::ABI_VERSION`].
        ours: u32,
    },
    /// A pinned map has another shape than this build's.
    #[error(
        "the map {map} pinned in {pin_dir} (ABI version {their_version}) is {theirs}, but this \
         slipgate (ABI version {our_version}) has {ours}: run the slipgate that made it, or stop it \
         with `--on-exit detach` (its flows end); where none runs, remove the directory"
    )]
    Layout {
        /// The map's name.
        map: &'static str,
        /// Where it is.
        pin_dir: PathBuf,
        /// `META.abi_version` found; 0 when unreadable.
        their_version: u32,
        /// [`slipgate_abi::ABI_VERSION`].
        our_version: u32,
        /// Shape found.
        theirs: String,
        /// Shape expected.
        ours: String,
    },
    /// No state is pinned there.
    #[error(
        "nothing is pinned in {pin_dir}: no `slipgate attach` serves this network namespace, or it \
         was given another --pin-dir"
    )]
    NothingPinned {
        /// Where it was looked for.
        pin_dir: PathBuf,
    },
    /// Some maps are pinned, others are missing.
    #[error("{pin_dir} has some of the maps but not {missing}: remove it when nothing uses it")]
    Incomplete {
        /// Where it is.
        pin_dir: PathBuf,
        /// The first one missing.
        missing: &'static str,
    },
    /// The binary was built where no BPF object was.
    #[error(
        "this slipgate was built without the BPF programs, with an empty stub in the place of {name}: \
         build it by `cargo xtask build` (or the programs alone by `cargo xtask build --bpf-only`, \
         and then the rest again)"
    )]
    StubObject {
        /// The object's file.
        name: &'static str,
    },
    /// The object could not be read, or the kernel refused a map or a program.
    #[error("can't load {what}: {reason}")]
    Load {
        /// Object, map or program.
        what: String,
        /// aya's error and what it was caused by, with the verifier's last lines.
        reason: String,
    },
    /// The wrong descriptors were handed over.
    #[error("got {got} for the map {map}, expected {expected}")]
    Descriptor {
        /// The map's name.
        map: &'static str,
        /// What it is.
        got: String,
        /// What it should be.
        expected: String,
    },
    /// A shared table has no free row left.
    #[error("no free row left in {table} ({rows} in all): {remedy}")]
    Full {
        /// The map's name.
        table: &'static str,
        /// How many there are.
        rows: u32,
        /// What would make room.
        remedy: &'static str,
    },
    /// Another set of pins serves the network namespace.
    #[error(
        "slipgate serves this network namespace already, with other pins: give --pin-dir {root}, for two sets would not know of each other's flows and ports"
    )]
    OtherPins {
        /// As for `--pin-dir`.
        root: String,
    },
    /// Another set of pins has flows of the network namespace.
    #[error(
        "a slipgate that is gone has left flows of this network namespace under --pin-dir {root}: start it there once more, which takes them over, and stop it in order"
    )]
    LeftPins {
        /// As for `--pin-dir`.
        root: String,
    },
    /// A process serves the network namespace by pins that are not there.
    #[error(
        "slipgate serves this network namespace already, but its pins are not in {pin_dir} as seen from here: `ip netns exec` hides them, `nsenter --net=/run/netns/NAME` does not"
    )]
    PinsHidden {
        /// Where they should be.
        pin_dir: String,
    },
    /// Somebody else is changing the pins, and does not come to an end.
    #[error(
        "{} is locked by {}, which starts or stops in this network namespace and has not come to an end: wait for it, or if it hangs, end it",
        path.display(), holder_named(.holder)
    )]
    Locked {
        /// The lock.
        path: PathBuf,
        /// The process that holds it, where that is known.
        holder: Option<u32>,
    },
    /// A VM of this name is served by a process that lives.
    #[error(
        "the VM `{name}` is already served by slipgate process {pid}: stop that one, or choose another name"
    )]
    VmInUse {
        /// The VM's name.
        name: String,
        /// Who serves it.
        pid: u32,
    },
    /// Another process serves another VM by this TAP.
    #[error(
        "the TAP of the VM `{name}` is served already, as the VM `{other}`, by slipgate process {pid}: stop that one, or choose another TAP"
    )]
    TapInUse {
        /// The VM that was to be served.
        name: String,
        /// The VM that is.
        other: String,
        /// Who serves it.
        pid: u32,
    },
    /// A name that doesn't fit its field.
    #[error("the VM name `{name}` is {bytes} bytes long, at most {max} fit and none is not enough")]
    VmName {
        /// As given.
        name: String,
        /// Its length.
        bytes: usize,
        /// The field's size.
        max: usize,
    },
    /// An interface is not there.
    #[error("there is no interface {0} in this network namespace")]
    NoInterface(String),
    /// An interface is there that was to be made.
    #[error(
        "there is a device {0} already: give another name, or remove it with `ip link delete {0}`"
    )]
    DeviceExists(String),
    /// A program that another process of slipgate attached to this interface would be doubled.
    #[error("ifindex {ifindex} already carries slipgate's {program} by {hook}: detach it first")]
    OtherHook {
        /// The interface.
        ifindex: u32,
        /// The program found.
        program: &'static str,
        /// How it is attached.
        hook: &'static str,
    },
    /// The kernel's netlink answer made no sense.
    #[error("netlink: {0}")]
    Netlink(String),
}

impl Error {
    pub(crate) fn os(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |answer| Self::Os { what, answer }
    }

    /// Whether privileges or a feature of the kernel are missing.
    pub fn is_unsupported(&self) -> bool {
        const REFUSALS: [i32; 4] = [libc::EPERM, libc::EACCES, libc::ENOSYS, libc::EOPNOTSUPP];
        match self {
            Self::Os { answer, .. } => {
                let errno = answer.raw_os_error();
                errno.is_some_and(|errno| REFUSALS.contains(&errno))
            }
            Self::Load { .. } => true,
            _ => false,
        }
    }

    /// Whether somebody else holds the lock.
    pub fn is_locked(&self) -> bool {
        matches!(self, Self::Locked { .. })
    }

    /// Whether the host is short of something that it may have again: descriptors or memory.
    pub fn is_shortage(&self) -> bool {
        const SHORTAGES: [i32; 4] = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS];
        self.errno().is_some_and(|errno| SHORTAGES.contains(&errno))
    }

    /// The kernel's error number, when there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Os { answer, .. } => answer.raw_os_error(),
            _ => None,
        }
    }
}

fn holder_named(holder: &Option<u32>) -> String {
    match holder {
        Some(pid) => format!("slipgate process {pid}"),
        None => "another slipgate process".to_owned(),
    }
}

/// What helps against the commonest refusals.
fn hint(answer: &io::Error) -> &'static str {
    match answer.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => " (needs CAP_BPF and CAP_NET_ADMIN: run it as root)",
        _ => "",
    }
}
