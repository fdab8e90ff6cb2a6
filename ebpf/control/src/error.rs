//! Errors of this crate: each says what was tried, on what, and what to do about it.

use std::{io, path::PathBuf};

use slipgate_abi::IfIndex;

/// Result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of an operation of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("can't {what}: {answer}{}", hint(.answer))]
    Os {
        /// Operation that failed, and its object.
        what: String,
        /// Error returned by the kernel.
        answer: io::Error,
    },
    /// The pin directory is not on a bpffs.
    #[error(
        "{dir} is not on a bpffs: give a --pin-dir that is, such as below {bpffs}",
        bpffs = crate::bpf::BPFFS
    )]
    NotBpffs {
        /// Directory given for the pins.
        dir: PathBuf,
    },
    /// Pinned state was made by a build with another ABI.
    #[error(
        "the maps pinned in {pin_dir} have ABI version {theirs}, this slipgate has {ours}: \
         run the slipgate that made them, or stop it with `--on-exit detach` (its flows end)"
    )]
    AbiVersion {
        /// Directory of the pins.
        pin_dir: PathBuf,
        /// ABI version of the pinned maps.
        theirs: u32,
        /// ABI version of this build, [`slipgate_abi::ABI_VERSION`].
        ours: u32,
    },
    /// A pinned map has another shape than this build's.
    #[error(
        "the map {map} pinned in {pin_dir} (ABI version {their_version}) is {theirs}, but this \
         slipgate (ABI version {our_version}) has {ours}: run the slipgate that made it, or stop it \
         with `--on-exit detach` (its flows end); where none runs, remove the directory"
    )]
    Layout {
        /// Name of the map.
        map: &'static str,
        /// Directory of the pins.
        pin_dir: PathBuf,
        /// ABI version in the pinned `META`; 0 if it cannot be read.
        their_version: u32,
        /// ABI version of this build, [`slipgate_abi::ABI_VERSION`].
        our_version: u32,
        /// Shape of the pinned map.
        theirs: String,
        /// Shape that this build requires.
        ours: String,
    },
    /// Nothing is pinned in the directory.
    #[error(
        "nothing is pinned in {pin_dir}: no `slipgate attach` serves this network namespace, or it \
         was given another --pin-dir"
    )]
    NothingPinned {
        /// Directory that was searched.
        pin_dir: PathBuf,
    },
    /// Some maps are pinned, others are missing.
    #[error("{pin_dir} has some of the maps but not {missing}: remove it when nothing uses it")]
    Incomplete {
        /// Directory of the pins.
        pin_dir: PathBuf,
        /// Name of the first map that is missing.
        missing: &'static str,
    },
    /// The binary was built where no BPF object was.
    #[error(
        "this slipgate was built without the BPF programs, with an empty stub in the place of {name}: \
         build it by `cargo xtask build` (or the programs alone by `cargo xtask build --bpf-only`, \
         and then the rest again)"
    )]
    StubObject {
        /// File name of the object.
        name: &'static str,
    },
    /// The object could not be read, or the kernel refused a map or a program.
    #[error("can't load {what}: {reason}")]
    Load {
        /// The object, map or program.
        what: String,
        /// Error of aya with its causes, and the verifier's last lines.
        reason: String,
    },
    /// A descriptor that was passed is not the expected map.
    #[error("got {got} for the map {map}, expected {expected}")]
    Descriptor {
        /// Name of the map.
        map: &'static str,
        /// Shape of the object that was passed.
        got: String,
        /// Shape of the map that was expected.
        expected: String,
    },
    /// A shared table has no free row.
    #[error(
        "there is no room for another {what}: this network namespace has room for {most}: {remedy}"
    )]
    Full {
        /// Kind of thing that takes a row of the table.
        what: &'static str,
        /// Number of its rows.
        most: u32,
        /// Action that would make room.
        remedy: &'static str,
    },
    /// A process serves the network namespace with another set of pins.
    #[error(
        "slipgate serves this network namespace already, with other pins: give --pin-dir {root}, for two sets would not know of each other's flows and ports"
    )]
    OtherPins {
        /// Value of `--pin-dir` for that set.
        root: String,
    },
    /// Another set of pins holds flows of the network namespace.
    #[error(
        "a slipgate that is gone has left flows of this network namespace under --pin-dir {root}: start it there once more, which takes them over, and stop it in order"
    )]
    LeftPins {
        /// Value of `--pin-dir` for that set.
        root: String,
    },
    /// A process serves the network namespace, but its pins are not visible.
    #[error(
        "slipgate serves this network namespace already, but its pins are not in {pin_dir} as seen from here: `ip netns exec` hides them, `nsenter --net=/run/netns/NAME` does not"
    )]
    PinsHidden {
        /// Directory where the pins should be.
        pin_dir: String,
    },
    /// Another process is changing the pins, and does not finish.
    #[error(
        "{} is locked by {}, which starts or stops in this network namespace and has not come to an end: wait for it, or if it hangs, end it",
        path.display(), holder_named(.holder)
    )]
    Locked {
        /// Path of the lock file.
        path: PathBuf,
        /// Process that holds the lock, if known.
        holder: Option<u32>,
    },
    /// A living process serves a VM of this name.
    #[error(
        "the VM `{name}` is already served by slipgate process {pid}: stop that one, or choose another name"
    )]
    VmInUse {
        /// Name of the VM.
        name: String,
        /// Pid of the process that serves it.
        pid: u32,
    },
    /// A living process serves another VM on this TAP.
    #[error(
        "the TAP of the VM `{name}` is served already, as the VM `{other}`, by slipgate process {pid}: stop that one, or choose another TAP"
    )]
    TapInUse {
        /// Name of the VM that was to be served.
        name: String,
        /// Name of the VM that is served.
        other: String,
        /// Pid of the process that serves it.
        pid: u32,
    },
    /// A living process's VM has what is to be routed to a VM, a /64 around it or an address of it.
    #[error("{}", routed_in_use(.wanted, .has, .name, *.pid))]
    RoutedInUse {
        /// Prefix that was to be routed to a VM.
        wanted: String,
        /// Prefix that the other VM has.
        has: String,
        /// Name of the other VM.
        name: String,
        /// Pid of the process that serves it.
        pid: u32,
    },
    /// The name of a VM is empty or does not fit its field.
    #[error("the VM name `{name}` is {bytes} bytes long, at most {max} fit and none is not enough")]
    VmName {
        /// Name as it was given.
        name: String,
        /// Length of the name, bytes.
        bytes: usize,
        /// Size of the field, bytes.
        max: usize,
    },
    /// The interface does not exist.
    #[error("there is no interface {0} in this network namespace")]
    NoInterface(String),
    /// The device that was to be made exists already.
    #[error(
        "there is a device {0} already: give another name, or remove it with `ip link delete {0}`"
    )]
    DeviceExists(String),
    /// A TAP that is to be opened is another device.
    #[error("{0} is no TAP: remove that device, or give the VM another TAP (`slipgate vm set`)")]
    NoTap(String),
    /// A process has the TAP open.
    #[error("a VMM has the TAP {0} open: end that one first")]
    TapIsOpen(String),
    /// The TAP has one queue, and several are to be opened.
    #[error(
        "the TAP {0} was made for one queue, and the machine's card has several: make it with \
         multi_queue"
    )]
    TapOfOneQueue(String),
    /// The interface already has this program of another slipgate process by another hook.
    #[error("ifindex {ifindex} already carries slipgate's {program} by {hook}: detach it first")]
    OtherHook {
        /// Index of the interface.
        ifindex: IfIndex,
        /// Name of the program.
        program: &'static str,
        /// Hook by which it is attached.
        hook: &'static str,
    },
    /// The kernel's netlink answer could not be parsed.
    #[error("netlink: {0}")]
    Netlink(String),
}

impl Error {
    pub(crate) fn os(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |answer| Self::Os { what, answer }
    }

    /// Whether the error means missing privileges or a missing feature of the kernel.
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

    /// Whether the error is that another process holds the lock.
    pub fn is_locked(&self) -> bool {
        matches!(self, Self::Locked { .. })
    }

    /// Whether the error is a temporary shortage of descriptors or memory.
    pub fn is_shortage(&self) -> bool {
        const SHORTAGES: [i32; 4] = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS];
        self.errno().is_some_and(|errno| SHORTAGES.contains(&errno))
    }

    /// Returns the kernel's error number; `None` if the error is not one of a system call.
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

fn routed_in_use(wanted: &str, has: &str, name: &str, pid: u32) -> String {
    let what = match wanted == has {
        true => format!("{wanted} is routed to"),
        false => format!("{wanted} overlaps {has}, which is routed to"),
    };
    format!(
        "{what} {name}, a VM of another process ({pid}): give each VM a prefix of its own, or stop that \
         process"
    )
}

/// Returns advice for the most common errors.
fn hint(answer: &io::Error) -> &'static str {
    match answer.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => " (needs CAP_BPF and CAP_NET_ADMIN: run it as root)",
        _ => "",
    }
}
