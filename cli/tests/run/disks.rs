//! Disks: what a guest writes is in the file, and what it may not write is refused.
use std::{
    fs,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use slipgate_testbed::{
    MicroVm, MicroVmEnd, pattern::Pattern, require_kvm, require_root_and_tun, signal, skipped,
    world::UPLINK,
};

use crate::{Bed, WAIT, jail::kernel_has_io_uring, jail_refused::IO_URING};

const MIB: u64 = 1 << 20;

impl Bed {
    /// A file of zeroes.
    fn disk(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    /// Runs the built-in guest with these disks. Returns its exit status and the lines about disks.
    fn guest(&self, disks: &[String], work: &str) -> (Option<i32>, Vec<serde_json::Value>) {
        let end = self.run_disks(disks, work);
        (end.status.code(), end.said("disk"))
    }

    /// Runs the built-in guest with these disks.
    fn run_disks(&self, disks: &[String], work: &str) -> MicroVmEnd {
        let work = format!("{work}; wait 1");
        let mut flags = vec!["--cmdline", &work];
        flags.extend(disks.iter().flat_map(|disk| ["--disk", disk]));
        self.start_with(&flags).finish(WAIT).unwrap()
    }
}

/// Whether a file's file system can pass the host's page cache by.
fn has_direct_transfers(path: &Path) -> bool {
    let mut options = fs::File::options();
    let opened = options.read(true).custom_flags(libc::O_DIRECT).open(path);
    opened.is_ok()
}

/// The guest's driver gives its memory back when its work is done. A disk that it had not reset before would
/// look at rings that are something else by then.
#[test]
fn a_disk_whose_work_is_done_is_reset_before_its_rings_are_freed() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let disk = bed.disk("a", MIB).display().to_string();
    let work = "disk 0 write 1048576; disk 0 random 1048576 2000 x32; fill 8; wait 500";
    let mut vm = bed.start_with(&["--disk", &disk, "--cmdline", work]);
    vm.await_line("\"fill\"", WAIT).unwrap();
    // What rests looks at its rings when it goes on.
    let pid = vm.broker_pid().to_string();
    bed.have(&["pause", &pid]);
    bed.have(&["resume", &pid]);
    let end = vm.finish(WAIT).unwrap();
    end.assert_success();
    let disk = &end.report["vmm"]["disks"][0];
    assert_eq!(
        (&disk["broken_rings"], &disk["failed"]),
        (&0.into(), &0.into()),
        "{disk}"
    );
}

#[test]
fn a_guest_finds_what_an_earlier_one_wrote_on_each_of_its_disks() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let paths = [bed.disk("a", 4 * MIB), bed.disk("b", MIB + 512)];
    let disks = paths.each_ref().map(|path| path.display().to_string());
    let (status, said) = bed.guest(&disks, "disk 0 write 3000320; disk 1 write 1049088");
    assert_eq!((status, said.len()), (Some(0), 2), "{said:?}");
    assert!(
        said.iter().all(|line| line.get("error").is_none()),
        "{said:?}"
    );
    let sizes = paths
        .each_ref()
        .map(|path| fs::metadata(path).unwrap().len());
    assert_eq!(sizes, [4 * MIB, MIB + 512]);
    let read_only = disks.each_ref().map(|disk| format!("{disk},ro"));
    let (status, said) = bed.guest(&read_only, "disk 0 check 3000320; disk 1 check 1049088");
    assert_eq!(status, Some(0), "{said:?}");

    // A byte that is another is noticed, so the guest has read the file.
    let file = fs::File::options().write(true).open(&paths[1]).unwrap();
    file.write_at(b"x", MIB + 511).unwrap();
    let (status, said) = bed.guest(&read_only, "disk 1 check 1049088");
    assert_eq!(status, Some(1), "{said:?}");
    assert_eq!(said[0]["error"], "byte 1049087 is wrong");
}

#[test]
fn what_a_guest_discards_and_makes_zeroes_is_so_in_the_file_in_each_cache_mode() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    for cache in ["writeback", "writethrough", "unsafe"] {
        let path = bed.disk(cache, 4 * MIB);
        let disk = [format!("{},cache={cache}", path.display())];
        let work = "disk 0 write 3145728; disk 0 discard 1048576; disk 0 check 512";
        let (status, said) = bed.guest(&disk, work);
        assert_eq!((status, said.len()), (Some(1), 3), "{said:?}");
        assert_eq!(said[1].get("error"), None, "{said:?}");
        assert_eq!(said[2]["error"], "byte 0 is wrong");
        let file = fs::read(&path).unwrap();
        let first = |file: &[u8]| file.iter().position(|byte| *byte != 0).unwrap() as u64;
        assert!(first(&file) >= MIB, "the first MiB is discarded");
        assert!(first(&file) < MIB + 512, "and no more");
        let (status, said) = bed.guest(&disk, "disk 0 zero 2097152");
        assert_eq!(status, Some(0), "{said:?}");
        let file = fs::read(&path).unwrap();
        assert_eq!(first(&file) / 512, 2 * MIB / 512, "two MiB are zeroes");
        assert_eq!(file.len() as u64, 4 * MIB);
    }
    let read_only = [format!("{},ro", bed.disk("ro", MIB).display())];
    let (status, said) = bed.guest(&read_only, "disk 0 discard 512; disk 0 zero 512");
    assert_eq!(status, Some(1), "{said:?}");
    for line in said {
        assert_eq!(line["error"], "the disk does not support the request");
    }
}

/// A block device of a file, until it is dropped.
struct Loop(String);

impl Loop {
    /// `None` where there are no loop devices.
    fn of(file: &Path, block: &str) -> Option<Loop> {
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--sector-size", block]);
        let output = losetup.arg(file).output().ok()?;
        let name = String::from_utf8(output.stdout).ok()?;
        output
            .status
            .success()
            .then(|| Loop(name.trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_disk_without_the_page_cache_is_a_file_or_a_device_of_any_blocks() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let path = bed.disk("direct", 4 * MIB);
    if !has_direct_transfers(&path) {
        return skipped!("{}: no direct transfers", path.display());
    }
    let loops = ["512", "4096"].map(|block| {
        let path = bed.disk(&format!("loop-{block}"), 4 * MIB);
        (Loop::of(&path, block), path)
    });
    let mut disks = vec![(path.clone(), path.display().to_string(), true)];
    for (device, path) in &loops {
        match device {
            Some(Loop(name)) => disks.push((path.clone(), name.clone(), false)),
            None => println!("no loop device of {}", path.display()),
        }
    }
    for (file, disk, is_file) in disks {
        let direct = [format!("{disk},cache=none")];
        let work = "disk 0 write 3145728; disk 0 check 3145728; disk 0 random 3145728 500 x32";
        let end = bed.run_disks(&direct, work);
        assert_eq!(end.status.code(), Some(0), "{disk}: {}", end.stderr);
        let counted = &end.report["vmm"]["disks"][0];
        assert_eq!(counted["written_bytes"], 3 * MIB, "{counted}");
        assert_eq!(counted["flushes"], 1, "{counted}");
        assert_eq!(counted["failed"], 0, "{counted}");
        // Another guest finds it by the page cache, and so does the host.
        let plain = [format!("{disk},ro")];
        let (status, said) = bed.guest(&plain, "disk 0 check 3145728");
        assert_eq!(status, Some(0), "{said:?}");
        let read_only = [format!("{disk},ro,cache=none")];
        let (status, said) = bed.guest(&read_only, "disk 0 check 3145728");
        assert_eq!(status, Some(0), "{said:?}");
        let (status, said) = bed.guest(&direct, "disk 0 discard 1048576; disk 0 zero 2097152");
        assert_eq!(status, Some(0), "{said:?}");
        if is_file {
            let there = fs::read(&file).unwrap();
            let first = there.iter().position(|byte| *byte != 0).unwrap() as u64;
            assert_eq!(first / 512, 2 * MIB / 512, "two MiB are zeroes");
        }
    }
}

#[test]
fn a_guest_writes_neither_to_a_read_only_disk_nor_behind_its_end() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let path = bed.disk("a", MIB);
    let read_only = [format!("{},ro", path.display())];
    let (status, said) = bed.guest(&read_only, "disk 0 write 512");
    assert_eq!(status, Some(1), "{said:?}");
    assert_eq!(said[0]["error"], "the disk answered with an I/O error");
    assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
    let disk = [path.display().to_string()];
    let (_, said) = bed.guest(&disk, "disk 0 write 1049088; disk 1 write 512");
    assert_eq!(said[0]["error"], "the disk has 2048 sectors");
    assert_eq!(said[1]["error"], "there is no such disk");
}

/// Block of a guest's log.
const BLOCK: usize = 4096;
/// Flags of a disk whose writes and flushes promise something, and how often each VMM is killed.
const PROMISES: [&str; 2] = ["writeback", "writethrough"];
/// The same past the host's page cache.
const DIRECT: &str = "none";
const KILLS: u64 = 6;

/// The last block that a guest said to be safe, with those before it.
fn last_safe(said: &[serde_json::Value]) -> usize {
    let safe: Vec<_> = said.iter().map(|it| it["safe"].as_u64().unwrap()).collect();
    assert!(safe.is_sorted(), "{safe:?}");
    *safe.last().unwrap() as usize
}

/// Checks the disk of a log that was cut off: all that is said to be safe is there, and what is
/// behind it is of the log, or was not written. Returns how many blocks of these were.
fn check_log(path: &Path, safe: usize) -> usize {
    let there = fs::read(path).unwrap();
    let (safe_bytes, rest) = there.split_at(safe * BLOCK);
    let mut pattern = Pattern::new(0);
    if let Err(at) = pattern.check(safe_bytes) {
        panic!("byte {at} of {} that are safe is wrong", safe_bytes.len());
    }
    let mut due = vec![0; BLOCK];
    let mut written = 0;
    for (block, number) in rest.chunks(BLOCK).zip(safe..) {
        pattern.fill(&mut due);
        let is_of_log = |(there, due): (&u8, &u8)| *there == 0 || there == due;
        assert!(block.iter().zip(&due).all(is_of_log), "block {number}");
        written += usize::from(block.iter().any(|byte| *byte != 0));
    }
    written
}

/// How a disk's file is read and written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// As the host allows it: by io_uring, on most.
    Any,
    /// The host refuses io_uring: by preadv and pwritev.
    Vectored,
}

impl Way {
    fn start(self, bed: &Bed, work: &str, disk: &str) -> MicroVm {
        let flags = ["--uplink", UPLINK, "--cmdline", work, "--disk", disk];
        MicroVm::start_changed(&bed.world.host, &bed.pins, &flags, |command| {
            if self == Self::Vectored {
                IO_URING.to(command);
            }
        })
        .unwrap()
    }

    /// Checks that a machine's disk, of one queue, had it.
    #[track_caller]
    fn assert_was(self, end: &MicroVmEnd) {
        let has = self == Self::Any && kernel_has_io_uring();
        let disk = &end.report["vmm"]["disks"][0];
        assert_eq!(disk["uring_queues"], u64::from(has), "{disk}");
    }
}

#[test]
fn what_was_flushed_is_in_the_file_when_the_vmm_is_killed_between_writes() {
    kill_between_writes(Way::Any);
}

#[test]
fn what_was_flushed_is_in_the_file_without_io_uring_too() {
    kill_between_writes(Way::Vectored);
}

#[test]
fn a_log_is_flushed_as_often_as_it_is_said_to_be_safe() {
    flush_a_log(Way::Any);
}

#[test]
fn a_log_is_flushed_as_often_without_io_uring_too() {
    flush_a_log(Way::Vectored);
}

/// The host's page cache outlives the VMM, so this shows that what is answered was given to the
/// host, and not that the host's medium has it: `no_answer_comes_before_the_file_is_synced` does.
fn kill_between_writes(way: Way) {
    const BYTES: u64 = 64 * MIB;
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut under_way = 0;
    let is_direct = has_direct_transfers(&bed.disk("direct", MIB));
    for cache in PROMISES.into_iter().chain(is_direct.then_some(DIRECT)) {
        for kill in 0..KILLS {
            let path = bed.disk("log", BYTES);
            let disk = format!("{},cache={cache}", path.display());
            let work = format!("disk 0 log {BYTES} 24 x16; wait 60s");
            let mut vm = way.start(&bed, &work, &disk);
            vm.await_line("\"safe\":", WAIT).unwrap();
            thread::sleep(Duration::from_millis(kill * 50));
            signal(vm.vmm_pid().unwrap(), libc::SIGKILL);
            let end = vm.finish(WAIT).unwrap();
            assert_eq!(end.status.code(), Some(122), "{}", end.stderr);
            let safe = last_safe(&end.said("safe"));
            let behind = check_log(&path, safe);
            eprintln!("{cache}: {safe} blocks are safe, and {behind} behind them written");
            under_way += behind;
            if kill + 1 == KILLS {
                let work = format!("disk 0 check {}; wait 1", safe * BLOCK);
                let end = way.start(&bed, &work, &disk).finish(WAIT).unwrap();
                end.assert_success();
                way.assert_was(&end);
            }
        }
    }
    assert!(under_way > 0, "no VMM was killed between writes");
    bed.assert_nothing_is_left();
}

fn flush_a_log(way: Way) {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    for cache in PROMISES {
        let path = bed.disk("log", MIB);
        let disk = format!("{},cache={cache}", path.display());
        let work = format!("disk 0 log {MIB} 24 x16; disk 0 check {MIB}; wait 1");
        let end = way.start(&bed, &work, &disk).finish(WAIT).unwrap();
        end.assert_success();
        way.assert_was(&end);
        let said = end.said("safe");
        assert_eq!(last_safe(&said), 256);
        assert_eq!(check_log(&path, 256), 0);
        let disk = &end.report["vmm"]["disks"][0];
        let flushes = match cache {
            "writeback" => said.len(),
            // Each write is, and the guest is not told of flushes.
            _ => 256,
        };
        assert_eq!(disk["flushes"], flushes, "{disk}");
        assert_eq!(disk["writes"], 256, "{disk}");
    }
}

#[test]
fn blocks_that_are_scattered_over_a_disk_are_there_and_flushed() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    for (work, each) in [("24 x16", 24_u64), ("64", 64)] {
        let path = bed.disk("scattered", MIB);
        let disk = format!("{}", path.display());
        let work = format!("disk 0 scatter {MIB} {work}; wait 1");
        let end = Way::Any.start(&bed, &work, &disk).finish(WAIT).unwrap();
        end.assert_success();
        assert_eq!(check_log(&path, 256), 0);
        let said = &end.said("disk")[0];
        let flushes = said["flushes"].as_u64().unwrap();
        // Some writes are answered while a flush is under way; they have a part in the next one.
        assert!(flushes > 0 && flushes <= 256_u64.div_ceil(each), "{said}");
        let disk = &end.report["vmm"]["disks"][0];
        assert_eq!(disk["flushes"], flushes, "{disk}");
        assert_eq!(disk["writes"], 256, "{disk}");
    }
}

#[test]
fn a_disk_that_can_not_be_one_or_is_in_use_is_refused_with_its_name() {
    require_root_and_tun!();
    let bed = Bed::new();
    let odd = bed.disk("odd", 513).display().to_string();
    let used = bed.disk("used", MIB);
    let lock = fs::File::open(&used).unwrap();
    lock.lock_shared().unwrap();
    let used = used.display().to_string();
    for (disk, part) in [
        ("/nowhere/d,ro", "--disk /nowhere/d: it can't be read"),
        (odd.as_str(), "its size is 513 bytes"),
        (used.as_str(), "it is in use by another process"),
        (",ro", "there is no file in it"),
        (
            "/sys/kernel/mm/transparent_hugepage/enabled,ro,cache=none",
            "enabled: its file system can't pass the host's page cache by",
        ),
        ("d,ro,cache=unsafe", "read-only has no writes"),
    ] {
        let end = bed.start_with(&["--disk", disk]).finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(2), "{disk}: {}", end.stderr);
        assert!(end.stderr.contains(part), "{}", end.stderr);
    }
    bed.assert_nothing_is_left();
}
