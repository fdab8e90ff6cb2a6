//! The jail of the VMM process, as the host sees it.
use std::{
    collections::BTreeMap,
    fs,
    io::{self, Seek as _, SeekFrom},
    path::PathBuf,
    process::Command,
};

use nix::sys::resource::{Resource, getrlimit};
use slipgate_testbed::{MicroVm, OrdinaryUser, require_kvm, require_root_and_tun, world::UPLINK};

use crate::{Bed, WAIT, jail_refused::PIVOT_ROOT, payload::Payload, processes::field};

/// Size of a log that has been written to for long.
const LOG_BYTES: u64 = 1 << 30;

/// Links of `/proc/PID/ns`, by name.
fn namespaces(pid: u32) -> BTreeMap<String, PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/ns")).unwrap();
    let link = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().unwrap();
        (name, fs::read_link(entry.path()).unwrap())
    };
    entries.map(|entry| link(entry.unwrap())).collect()
}

/// A number of `/proc/PID/limits`: the soft and the hard limit, which are the same.
fn limit(pid: u32, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    let mut numbers = line[name.len()..].split_whitespace();
    let (soft, hard) = (numbers.next().unwrap(), numbers.next().unwrap());
    assert_eq!(soft, hard, "{line}");
    soft.parse().unwrap()
}

fn assert_jailed(vm: &MicroVm) {
    let pid = vm.vmm_pid().unwrap();
    let (its, ours) = (namespaces(pid), namespaces(std::process::id()));
    let own = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];
    for name in own {
        assert_ne!(its[name], ours[name], "{name}");
    }
    // It is the first process there: nothing else is.
    let numbers = field(&format!("/proc/{pid}/status"), "NSpid");
    assert_eq!(numbers.split_whitespace().last(), Some("1"));
    // One user has a number there, and no group may be added.
    let users = fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap();
    assert_eq!(users.split_whitespace().nth(2), Some("1"), "{users}");
    let groups = fs::read_to_string(format!("/proc/{pid}/setgroups")).unwrap();
    assert_eq!(groups.trim(), "deny");
    // Its root is an empty file system for reading only, and the only one.
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    let [mount] = mounts.lines().collect::<Vec<_>>()[..] else {
        panic!("{mounts}");
    };
    assert!(mount.contains(" / / ro,nosuid,nodev,noexec"), "{mount}");
    assert!(fs::write(root.join("file"), "x").is_err());
}

/// What the VMM may lock at most, of what this process may, bytes.
fn locked_limit() -> u64 {
    let (_, hard) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap();
    hard.min(64 << 20)
}

fn assert_limited(vm: &MicroVm, file_bytes: u64) {
    let pid = vm.vmm_pid().unwrap();
    assert_eq!(limit(pid, "Max core file size"), 0);
    assert_eq!(limit(pid, "Max locked memory"), locked_limit());
    assert_eq!(limit(pid, "Max open files"), 1_024);
    assert_eq!(limit(pid, "Max file size"), file_bytes);
}

#[test]
fn the_vmm_is_alone_in_its_namespaces_with_an_empty_root() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let image = Payload::default().say("here\n").halt();
    let disk = bed.folder.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(70 << 20).unwrap();
    let flags = ["--disk", disk.to_str().unwrap(), "--jail", "required"];
    let mut vm = bed.start(&image, &flags);
    vm.await_line("here", WAIT).unwrap();
    assert_jailed(&vm);
    // The disk is larger than any file of a snapshot would be.
    assert_limited(&vm, 70 << 20);
}

#[test]
fn a_user_without_privileges_has_the_same_jail() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let user = OrdinaryUser::new().unwrap();
    let kernel = user.file("kernel");
    fs::write(&kernel, Payload::default().say("here\n").halt()).unwrap();
    let flags = ["--kernel", kernel.to_str().unwrap(), "--memory", "32"];
    let all = [&flags[..], &["--jail", "required"]].concat();
    let mut vm = MicroVm::start_by(&bed.world.host, &user, &all).unwrap();
    vm.await_line("here", WAIT).unwrap();
    assert_jailed(&vm);
    // A snapshot's file is a little larger than the memory at most.
    assert_limited(&vm, (32 + 16) << 20);
}

/// As on a host whose root is an initial RAM file system, which no process can leave.
#[test]
fn where_the_old_root_is_covered_the_jail_is_the_same() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let kernel = bed.kernel("kernel", &Payload::default().say("here\n").halt());
    let machine = ["--kernel", kernel.to_str().unwrap(), "--memory", "32"];
    let flags = [&machine[..], &["--uplink", UPLINK, "--jail", "required"]].concat();
    let refuse = |command: &mut Command| PIVOT_ROOT.to(command);
    let mut vm = MicroVm::start_changed(&bed.world.host, &bed.pins, &flags, refuse).unwrap();
    vm.await_line("here", WAIT).unwrap();
    assert_jailed(&vm);
}

/// Whether this kernel makes io_urings for processes without privileges.
pub(crate) fn kernel_has_io_uring() -> bool {
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    // EFAULT, not ENOSYS: the call is there, and has no parameters.
    // SAFETY: the call gets no memory.
    let refused = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, 0) } == -1
        && io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT);
    // Linux has it from 6.6 on.
    refused && disabled.map_or(true, |text| text.trim() == "0")
}

/// Asserts that the card and each queue of the disk had an io_uring, of a guest that halts.
fn assert_uring(vm: MicroVm, queues: u64) {
    let end = vm.finish(WAIT).unwrap();
    let vmm = &end.report["vmm"];
    let has = u64::from(kernel_has_io_uring());
    assert_eq!(vmm["net"]["pairs"][0]["uring"], has, "{}", end.stderr);
    assert_eq!(
        vmm["disks"][0]["uring_queues"],
        has * queues,
        "{}",
        end.stderr
    );
}

/// Linux counts the memory of rings as locked by the user of the process.
#[test]
fn a_jailed_vmm_has_its_io_urings() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let image = Payload::default().exit(0);
    let disk = bed.folder.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let disk = ["--disk", disk.to_str().unwrap()];
    let flags = [&disk[..], &["--jail", "required", "--cpus", "2"]].concat();
    assert_uring(bed.start(&image, &flags), 2);
}

#[test]
fn a_console_that_is_a_file_has_a_bound_and_what_is_lost_is_counted() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let printed = "x".repeat(6_000);
    let kernel = bed.kernel("kernel", &Payload::default().say(&printed).exit(0));
    let of = |name: &str| bed.folder.path().join(name);
    let (console, said, report) = (of("console"), of("said"), of("report"));
    let script = "\"$0\" run --own --uplink \"$1\" --pin-dir \"$2\" --kernel \"$3\" --memory 32 \
                  --console-limit 4K --report \"$4\" >\"$5\" 2>>\"$6\"";
    // Messages go behind what is there, and that is beyond what may be written to other files.
    let log = fs::File::create(&said).unwrap();
    log.set_len(LOG_BYTES).unwrap();
    let mut command = Command::new("sh");
    command
        .args(["-c", script, env!("CARGO_BIN_EXE_slipgate"), UPLINK])
        .args([bed.pins.path(), &kernel, &report, &console, &said]);
    bed.world.host.output(command).unwrap();
    assert!(fs::read_to_string(&console).unwrap() == printed[..4_096]);
    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&report).unwrap()).unwrap();
    let serial = &report["vmm"]["serial"];
    assert_eq!(serial["output_lost_bytes"], 6_000 - 4_096, "{serial}");
    let mut log = fs::File::open(&said).unwrap();
    log.seek(SeekFrom::Start(LOG_BYTES)).unwrap();
    let said = io::read_to_string(log).unwrap();
    assert!(
        said.contains("1904 bytes that the guest printed were lost"),
        "{said}"
    );
}
