//! `--jail required` on a host that refuses a part of the jail, and ends of the broker or the VMM
//! while the jail is entered: the run is refused, says what was tried, and leaves nothing.
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::{fs::MetadataExt as _, process::CommandExt as _},
    },
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use slipgate_ipc::{
    channel::Channel,
    vmm::{ToVmm, VmmJail},
};
use slipgate_testbed::{
    OrdinaryUser, PinDir, Slipgate, require_kvm, require_root_and_tun, skipped, slipgate,
    world::UPLINK,
};

use crate::{Bed, cgroups::Parent, eventually, payload::Payload};

const SLIPGATE: &str = env!("CARGO_BIN_EXE_slipgate");
/// Exit status of a run whose flags can't be used.
const USAGE: i32 = 2;

/// A system call that a host refuses.
pub(crate) struct Refused {
    call: libc::c_long,
    argument: u8,
    /// Bits of the argument that are looked at, and what they are then.
    mask: u64,
    value: u64,
}

/// A namespace that a process enters by itself, when it has its user already.
const CGROUP_NAMESPACE: Refused = Refused {
    call: libc::SYS_unshare,
    argument: 0,
    mask: libc::CLONE_NEWCGROUP as u64,
    value: libc::CLONE_NEWCGROUP as u64,
};
/// The namespace that a process is made in.
const PID_NAMESPACE: Refused = Refused {
    call: libc::SYS_clone,
    argument: 0,
    mask: libc::CLONE_NEWPID as u64,
    value: libc::CLONE_NEWPID as u64,
};
/// What the empty root begins with.
const MOUNTS_APART: Refused = Refused {
    call: libc::SYS_mount,
    argument: 3,
    mask: u64::MAX,
    value: libc::MS_REC | libc::MS_PRIVATE,
};
/// The exchange of the root for another one.
pub(crate) const PIVOT_ROOT: Refused = Refused {
    call: libc::SYS_pivot_root,
    argument: 0,
    mask: 0,
    value: 0,
};
/// Every io_uring.
pub(crate) const IO_URING: Refused = Refused {
    call: libc::SYS_io_uring_setup,
    argument: 0,
    mask: 0,
    value: 0,
};
/// A part of the confinement that no VMM does without.
const KEEPING_CAPABILITIES: Refused = Refused {
    call: libc::SYS_prctl,
    argument: 0,
    mask: u64::MAX,
    value: libc::PR_SET_KEEPCAPS as u64,
};

impl Refused {
    fn filter(&self) -> BpfProgram {
        let bits = SeccompCmpOp::MaskedEq(self.mask);
        let width = SeccompCmpArgLen::Qword;
        let condition = SeccompCondition::new(self.argument, width, bits, self.value).unwrap();
        let rule = SeccompRule::new(vec![condition]).unwrap();
        let filter = SeccompFilter::new(
            BTreeMap::from([(self.call, vec![rule])]),
            SeccompAction::Allow,
            SeccompAction::Errno(libc::EPERM as u32),
            TargetArch::try_from(std::env::consts::ARCH).unwrap(),
        );
        filter.unwrap().try_into().unwrap()
    }

    /// Has the host refuse it to a command and all its processes.
    pub(crate) fn to(&self, command: &mut Command) {
        let filter = self.filter();
        let refuse =
            move || seccompiler::apply_filter(&filter).map_err(|_| io::Error::last_os_error());
        // SAFETY: it makes system calls only; the filter was made before.
        unsafe { command.pre_exec(refuse) };
    }
}

/// Locks of blocks of user ids.
fn claims() -> BTreeSet<PathBuf> {
    let files = fs::read_dir("/run/slipgate/users").into_iter().flatten();
    files.map(|file| file.unwrap().path()).collect()
}

/// Whether a lock that was found is still there, without a process that holds it.
fn is_left(path: &PathBuf) -> bool {
    let Ok(file) = fs::File::open(path) else {
        return false;
    };
    let is_there = || file.metadata().is_ok_and(|data| data.nlink() > 0);
    // A process that is about to lock it or to remove it is not hindered for longer than this takes.
    is_there() && file.try_lock().is_ok() && is_there()
}

/// A run whose jail is required, in a cgroup, with a socket; what it could leave is looked for.
struct Run {
    bed: Bed,
    parent: Parent,
    claims: BTreeSet<PathBuf>,
}

impl Run {
    /// `None`: this host has no cgroup v2.
    fn prepare(name: &str) -> Option<Self> {
        Some(Self {
            parent: Parent::make(name)?,
            bed: Bed::new(),
            claims: claims(),
        })
    }

    fn command(&self, jail: &str, flags: &[&str]) -> Command {
        let kernel = self.bed.kernel("kernel", &Payload::default().exit(0));
        let mut command = Command::new(SLIPGATE);
        command
            .args(["run", "--jail", jail, "--memory", "32", "--kernel"])
            .arg(kernel)
            .arg("--cgroup")
            .arg(&self.parent.0)
            .arg("--vsock")
            .arg(format!("3,{}", self.socket().display()))
            .args(["--uplink", UPLINK, "--pin-dir"])
            .arg(self.bed.pins.path())
            .args(flags);
        command
    }

    fn socket(&self) -> PathBuf {
        self.bed.folder.path().join("vsock")
    }

    /// Runs it, and returns what it says once it has failed with this status.
    #[track_caller]
    fn fails(&self, command: Command, status: i32) -> String {
        let ended = self.bed.world.host.output_with(command, &[status]).unwrap();
        let said = said(&ended);
        assert_eq!(ended.status.code(), Some(status), "{said}");
        said
    }

    #[track_caller]
    fn assert_nothing_is_left(&self) {
        let groups = self.parent.children();
        assert_eq!(groups, Vec::<PathBuf>::new());
        assert!(!self.socket().exists());
        self.bed.assert_nothing_is_left();
        self.assert_no_claim_is_left();
    }

    #[track_caller]
    fn assert_no_claim_is_left(&self) {
        // Other machines of this host come and go meanwhile.
        let none = || {
            claims()
                .difference(&self.claims)
                .all(|claim| !is_left(claim))
        };
        eventually("no block of user ids is left", none);
    }
}

fn said(ended: &Output) -> String {
    String::from_utf8_lossy(&ended.stderr).into_owned()
}

#[test]
fn a_jail_that_is_refused_ends_the_run_and_leaves_nothing() {
    require_root_and_tun!();
    require_kvm!();
    let Some(run) = Run::prepare("refused") else {
        return skipped!("this host has no cgroup v2");
    };
    for (refused, status, parts) in [
        (
            PID_NAMESPACE,
            USAGE,
            [
                "--jail required: the VMM can't have namespaces",
                "slipgate doctor",
            ],
        ),
        (
            CGROUP_NAMESPACE,
            USAGE,
            [
                "--jail required: confining the process: namespaces",
                "slipgate doctor",
            ],
        ),
        (
            MOUNTS_APART,
            USAGE,
            [
                "--jail required: confining the process: mounts apart",
                "slipgate doctor",
            ],
        ),
        (
            KEEPING_CAPABILITIES,
            1,
            [
                "confining the process: keeping capabilities",
                "before the machine was made",
            ],
        ),
    ] {
        let mut command = run.command("required", &["--own"]);
        refused.to(&mut command);
        let said = run.fails(command, status);
        for part in parts {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(said.contains("Operation not permitted"), "{said}");
        run.assert_nothing_is_left();
    }
    // Without the flag it runs: the filter refuses nothing else.
    let mut command = run.command("auto", &["--own"]);
    CGROUP_NAMESPACE.to(&mut command);
    let ended = run.bed.world.host.output(command).unwrap();
    assert!(
        said(&ended).contains("without some of its namespaces"),
        "{}",
        said(&ended)
    );
    run.assert_nothing_is_left();
}

#[test]
fn a_daemon_has_no_vm_of_a_machine_whose_jail_is_refused() {
    require_root_and_tun!();
    require_kvm!();
    let Some(run) = Run::prepare("joined") else {
        return skipped!("this host has no cgroup v2");
    };
    let (host, pins): (_, &PinDir) = (&run.bed.world.host, &run.bed.pins);
    let _daemon = Slipgate::serve(host, pins, &["--uplink", UPLINK]).unwrap();
    let mut command = run.command("required", &[]);
    CGROUP_NAMESPACE.to(&mut command);
    let said = run.fails(command, USAGE);
    assert!(
        said.contains("--jail required: confining the process: namespaces"),
        "{said}"
    );
    let listed = slipgate::run(host, pins, &["vm", "ls", "--json"]).unwrap();
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(listed, serde_json::json!([]));
    assert_eq!(run.parent.children(), Vec::<PathBuf>::new());
    let links = host.ip("-brief link").unwrap();
    assert!(!links.contains("sgvm"), "{links}");
    assert!(!run.socket().exists());
}

#[test]
fn a_user_without_privileges_has_no_machine_without_its_jail_either() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let user = OrdinaryUser::new().unwrap();
    let kernel = user.file("kernel");
    fs::write(&kernel, Payload::default().exit(0)).unwrap();
    let kernel = kernel.to_str().unwrap();
    let flags = [
        "run",
        "--mode",
        "userspace",
        "--jail",
        "required",
        "--kernel",
        kernel,
    ];
    let run = [&flags[..], &["--memory", "32"]].concat();
    let mut command = user.slipgate_with_kvm(&run);
    CGROUP_NAMESPACE.to(&mut command);
    let ended = bed.world.host.output_with(command, &[USAGE]).unwrap();
    let said = said(&ended);
    assert_eq!(ended.status.code(), Some(USAGE), "{said}");
    assert!(
        said.contains("--jail required: confining the process: namespaces"),
        "{said}"
    );
    assert!(user.has_nothing_left());
}

/// What fails in the broker once the VMM has been told to confine itself.
#[test]
fn a_broker_that_fails_while_the_jail_is_entered_takes_the_vmm_and_the_rest_along() {
    require_root_and_tun!();
    require_kvm!();
    let Some(run) = Run::prepare("broker") else {
        return skipped!("this host has no cgroup v2");
    };
    let nowhere = run.command("required", &["--own", "--initrd", "/nowhere/initrd"]);
    let said = run.fails(nowhere, USAGE);
    assert!(
        said.contains("--initrd /nowhere/initrd: it can't be read"),
        "{said}"
    );
    run.assert_nothing_is_left();
    // Making the TAP, which is the last before the second message.
    let taken = run.command("required", &["--own", "--tap", "lo"]);
    let ended = run.bed.world.host.output_with(taken, &[1, USAGE]).unwrap();
    assert!(!ended.status.success());
    assert!(self::said(&ended).contains("lo"), "{}", self::said(&ended));
    run.assert_nothing_is_left();
}

/// Starts a VMM, tells it to confine itself, and does `then` with the channel in the place of the
/// second message. Returns how the VMM ended.
fn vmm_of_a_failing_broker(then: impl FnOnce(Channel)) -> Output {
    let (ours, theirs) = Channel::pair().unwrap();
    let fd = theirs.as_fd().as_raw_fd();
    let mut command = Command::new(SLIPGATE);
    command
        .args(["vmm", "--fd", &fd.to_string(), "--user", "65534"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let keep = move || {
        // SAFETY: numbers only.
        match unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: it makes a system call only.
    unsafe { command.pre_exec(keep) };
    let vmm = command.spawn().unwrap();
    drop(theirs);
    let jail = VmmJail {
        log: "info".into(),
        in_namespaces: true,
        required: true,
    };
    ours.send(ToVmm::<std::os::fd::OwnedFd>::Confine(jail))
        .unwrap();
    then(ours);
    vmm.wait_with_output().unwrap()
}

#[test]
fn a_vmm_whose_broker_fails_between_its_messages_makes_no_machine() {
    require_root_and_tun!();
    // The broker has gone.
    let ended = vmm_of_a_failing_broker(drop);
    assert_eq!(ended.status.code(), Some(1));
    let due = "the broker ended before it sent the machine's settings";
    assert!(said(&ended).contains(due), "{}", said(&ended));
    // It says something else.
    let mut kept = None;
    let ended = vmm_of_a_failing_broker(|channel| {
        channel.send(ToVmm::<std::os::fd::OwnedFd>::Go).unwrap();
        kept = Some(channel);
    });
    assert_eq!(ended.status.code(), Some(1));
    let due = "the broker sent another message in the place of the machine's settings";
    assert!(said(&ended).contains(due), "{}", said(&ended));
}
