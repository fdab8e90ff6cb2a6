//! Random reads from a disk of `slipgate run`, and from QEMU's virtio-blk with a thread of its own, by
//! the same guest, beside each other.
use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;
use slipgate_testbed::{MicroVm, pattern::Pattern};

use super::*;

/// Size of the disk, which is in the host's page cache.
const DISK_BYTES: usize = 128 << 20;
const READS: u32 = 10_000;
const ROUNDS: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Slipgate,
    QemuThreads,
    QemuIoUring,
}

/// What a guest measured, and the CPU time of the threads that carried the reads out.
struct Row {
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
    device_us: f64,
}

/// Returns the CPU time of the process's threads whose names are chosen, µs.
fn cpu_us(pid: u32, chosen: impl Fn(&str) -> bool) -> f64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let mut total = 0.0;
    for thread in threads {
        let read = |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        if chosen(read("comm").trim()) {
            let spent = read("schedstat");
            let ns = spent
                .split_whitespace()
                .next()
                .and_then(|ns| ns.parse().ok());
            total += ns.unwrap_or(0.0) / 1e3;
        }
    }
    total
}

impl Row {
    fn of(line: &Value, device_us: f64) -> Row {
        assert_eq!(line.get("error"), None, "{line}");
        let number = |key: &str| line[key].as_f64().unwrap();
        Row {
            per_second: f64::from(READS) / number("took_us") * 1e6,
            p50_us: number("p50_us"),
            p99_us: number("p99_us"),
            device_us: device_us / f64::from(READS),
        }
    }
}

fn under_slipgate(stand: &Stand, disk: &Path, work: &str) -> Row {
    let pins = PinDir::new().unwrap();
    let disk = format!("{},ro", disk.display());
    // The guest that the machine boots is this tree's, whatever the binary has built in.
    let image = slipgate_testbed::builtin_guest::image().unwrap();
    let flags = ["--kernel", image.to_str().unwrap(), "--cmdline", work];
    let more = ["--disk", &disk, "--cpus", "1", "--uplink", UPLINK];
    let flags = [&flags[..], &more].concat();
    let mut vm = MicroVm::start(&stand.world.host, &pins, &flags).unwrap();
    let line = vm.await_line("\"disk\"", TIMEOUT).unwrap();
    let device_us = cpu_us(vm.vmm_pid().unwrap(), |name| name.starts_with("disk"));
    assert!(device_us > 0.0, "no thread of the disk");
    vm.finish(TIMEOUT).unwrap().assert_success();
    Row::of(&line.json().unwrap(), device_us)
}

fn under_qemu(stand: &Stand, disk: &Path, work: &str, engine: &str) -> Row {
    let qemu = stand.qemu(Accelerator::Kvm, Network::User, work);
    let with_disk = with_disk(qemu, disk, engine);
    let mut child = stand.world.host.spawn(with_disk).unwrap();
    let mut console = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("\"disk\"") {
        line.clear();
        let read = console.read_line(&mut line).unwrap();
        assert!(read > 0, "QEMU ended");
    }
    // All but the vCPU and the main loop, which has the network and the start.
    let device_us = cpu_us(child.id(), |name| {
        !name.starts_with("CPU ") && !name.starts_with("qemu-system")
    });
    assert!(
        device_us > 0.0,
        "it had ended before its threads were looked at"
    );
    let mut rest = String::new();
    console.read_to_string(&mut rest).unwrap();
    child.wait().unwrap();
    Row::of(&serde_json::from_str(line.trim()).unwrap(), device_us)
}

/// Returns QEMU's command for one CPU and this disk, which has a thread of its own.
fn with_disk(mut qemu: Qemu<'_>, disk: &Path, engine: &str) -> Command {
    qemu.boot.cpus = 1;
    let drive = format!(
        "file={},format=raw,if=none,id=d,cache=writeback,readonly=on,aio={engine}",
        disk.display()
    );
    let command = qemu.command().unwrap();
    let mut with_disk = Command::new(command.get_program());
    with_disk
        .args(command.get_args())
        .args(["-object", "iothread,id=io", "-drive", &drive])
        .args(["-device", "virtio-blk-pci,drive=d,iothread=io"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    with_disk
}

/// Makes a disk as the guest's `disk 0 write` does, in a folder of its own.
fn disk_of(bytes: usize) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    let mut content = vec![0; bytes];
    Pattern::new(0).fill(&mut content);
    fs::write(&disk, content).unwrap();
    (folder, disk)
}

#[test]
fn under_qemu_it_reads_a_disk_at_random_and_notices_a_wrong_byte() {
    require_root_and_tun!();
    require_kvm!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    let stand = Stand::new();
    let (_folder, disk) = disk_of(1 << 20);
    let guest = |work: &str| {
        let qemu = stand.qemu(Accelerator::Kvm, Network::User, work);
        let output = qemu
            .run_by(with_disk(qemu.clone(), &disk, "threads"))
            .unwrap();
        (output.is_well(), output.results("disk"))
    };
    // Each of the 256 blocks is among 3,000 reads.
    let thirty_two = "disk 0 random 1048576 3000 x32";
    let (is_well, said) = guest(&format!("disk 0 random 1048576 300; {thirty_two}"));
    assert!(is_well && said.len() == 2, "{said:?}");
    assert_eq!(
        (&said[0]["count"], &said[1]["at_once"]),
        (&300.into(), &32.into())
    );
    let file = fs::File::options().write(true).open(&disk).unwrap();
    file.write_at(b"x", 700_001).unwrap();
    let (is_well, said) = guest(thirty_two);
    assert!(!is_well, "{said:?}");
    assert_eq!(said[0]["error"], "byte 700001 is wrong");
    let (_, said) = guest("disk 0 random 1052672 1");
    assert_eq!(said[0]["error"], "the disk has 2048 sectors");
}

fn median(rows: &[&Row], of: fn(&Row) -> f64) -> f64 {
    let mut values: Vec<f64> = rows.iter().map(|row| of(row)).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints each run and the medians. The guest polls, so its own CPU is always busy.
#[test]
#[ignore = "a measurement"]
fn random_reads_beside_qemu() {
    require_root_and_tun!();
    require_kvm!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    let stand = Stand::new();
    let (_folder, disk) = disk_of(DISK_BYTES);
    let title = "at-once by            reads/s  p50-us  p99-us  device-cpu-us/read";
    println!("{title}");
    let print = |at_once: u32, by: &str, figures: [f64; 4]| {
        let [per_second, p50, p99, device] = figures;
        println!("{at_once:>7} {by:<12} {per_second:>9.0} {p50:>7.1} {p99:>7.1} {device:>8.2}");
    };
    for at_once in [32, 1] {
        let work = format!("disk 0 random {DISK_BYTES} {READS} x{at_once}; wait 1");
        let mut rows: Vec<(By, Row)> = Vec::new();
        let all = [By::Slipgate, By::QemuThreads, By::QemuIoUring];
        for round in 0..ROUNDS {
            for turn in 0..all.len() {
                let by = all[(round + turn) % all.len()];
                let row = match by {
                    By::Slipgate => under_slipgate(&stand, &disk, &work),
                    By::QemuThreads => under_qemu(&stand, &disk, &work, "threads"),
                    By::QemuIoUring => under_qemu(&stand, &disk, &work, "io_uring"),
                };
                let figures = [row.per_second, row.p50_us, row.p99_us, row.device_us];
                print(at_once, &format!("{by:?}"), figures);
                rows.push((by, row));
            }
        }
        println!("medians");
        for by in all {
            let of: Vec<&Row> = rows.iter().filter(|r| r.0 == by).map(|r| &r.1).collect();
            let figures = [
                median(&of, |row| row.per_second),
                median(&of, |row| row.p50_us),
                median(&of, |row| row.p99_us),
                median(&of, |row| row.device_us),
            ];
            print(at_once, &format!("{by:?}"), figures);
        }
    }
}
