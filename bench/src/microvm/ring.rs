//! The network card alone, slipgate's and QEMU's: guest's ring → TAP → guest's ring.
//!
//! A filter on the TAP reflects each IP packet, so the guest receives what it floods; the kernel
//! does nothing else. The VMM is a process without NAT: this program started again, or QEMU. The
//! cost of a frame is the CPU time of all threads of the VMM except the vCPUs.

use std::{
    env,
    fs::{self, File},
    io::{BufRead, BufReader, Read},
    os::fd::OwnedFd,
    process::{Child, Command, Stdio},
    sync::{
        LazyLock,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use slipgate_control::tap::open_queue;
use slipgate_testbed::{
    NetNs,
    builtin_guest::{self, Accelerator, Boot, Network, Qemu},
};
use slipgate_vmm::{
    Devices, Machine, MachineConfig, Origin, Outcome, SerialIo, ThreadSetup,
    boot::{BootSource, Kernel},
    virtio::net::NetConfig,
};

use crate::{
    results::{self, Cell, Table},
    workload::{Measured, Sample, Unit},
};

/// Argument that starts this program as a VMM: `slipgate-bench vmm CPUS COMMAND-LINE`.
const VMM: &str = "vmm";
const OURS: &str = "slipgate-vmm";
const QEMU: &str = "qemu";
const TAP: &str = "ring0";
/// MTU for frames of 60,000 bytes, bytes.
const MTU: u16 = 62_000;
const MEMORY_MIB: u32 = 128;
const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
const TIMEOUT: Duration = Duration::from_secs(40);

/// A frame size and a number of queue pairs, and their metrics.
struct Case {
    frame_bytes: u32,
    pairs: u8,
    measured: Measured,
}

static CASES: LazyLock<Vec<Case>> = LazyLock::new(|| {
    let sizes = [(64, "64 B"), (1500, "1500 B"), (60_000, "60 KB")];
    let cases = sizes.into_iter().flat_map(|size| [(size, 1), (size, 2)]);
    let case = |((frame_bytes, size), pairs)| {
        let metric = |unit: Unit, what| unit.of(format!("ring {size} ×{pairs}{what}").leak());
        let metrics = vec![
            // Frames moved per second; out and in count twice.
            metric(Unit::ThousandPerSecond, ""),
            // Frames per second that returned to the guest's ring.
            metric(Unit::ThousandPerSecond, " whole way"),
            // CPU time per moved frame.
            metric(Unit::Nanoseconds, " CPU"),
        ];
        let workload = format!("ring {frame_bytes} ×{pairs}").leak();
        Case {
            frame_bytes,
            pairs,
            measured: (workload, metrics.leak()),
        }
    };
    cases.map(case).collect()
});

/// Measures each case on both VMMs.
pub(super) fn round(round: usize, quick: bool, cells: &mut Vec<Cell>) {
    for case in CASES.iter() {
        let (workload, _) = case.measured;
        for contender in [OURS, QEMU] {
            let outcome = one(contender, case, quick);
            cells.push(Cell::of(round, contender, workload, outcome));
        }
    }
}

/// A table per metric, if the card was measured.
pub(super) fn tables(cells: &[Cell]) -> Vec<Table> {
    if !cells.iter().any(|cell| cell.contender == OURS) {
        return Vec::new();
    }
    let measured: Vec<_> = CASES.iter().map(|case| case.measured).collect();
    results::tables(&measured, &[OURS, QEMU], QEMU, cells)
}

fn one(contender: &str, case: &Case, quick: bool) -> Result<Sample> {
    let &Case {
        frame_bytes,
        pairs,
        measured: (_, metrics),
    } = case;
    let frames = match (frame_bytes, quick) {
        (60000, true) => 5_000,
        (60000, false) => 40_000,
        (_, true) => 50_000,
        (_, false) => 500_000,
    };
    let ns = NetNs::new("ring")?;
    // QEMU does not open a single queue of a device made for many.
    let many = if pairs > 1 { "multi_queue" } else { "" };
    ns.ip(&format!("tuntap add {TAP} mode tap vnet_hdr {many}"))?;
    // Answers ARP; what the guest floods is turned around before it gets there.
    ns.ip(&format!("addr add 10.0.2.2/24 dev {TAP}"))?;
    ns.ip(&format!("link set {TAP} mtu {MTU} up"))?;
    turn_around(&ns)?;
    let line = format!(
        "address 10.0.2.15/24 10.0.2.2; flood 10.0.2.2:9 {frames} {frame_bytes} x{pairs}; wait 100"
    );
    let command = match contender {
        OURS => ours(pairs, &line)?,
        _ => qemu(&ns, pairs, &line)?,
    };
    let measured = watch(ns.spawn(command)?)?;
    let carried = measured.result["rx_frames"].as_f64().unwrap_or(0.0);
    let sent = measured.result["done"].as_f64().unwrap_or(0.0);
    let took_us = measured.result["took_us"].as_f64().unwrap_or(f64::NAN);
    // Out and in is two.
    let moved = sent + carried;
    let values = [
        (metrics[0].name, moved / took_us * 1e3),
        (metrics[1].name, carried / took_us * 1e3),
        (metrics[2].name, measured.cpu_ns as f64 / moved),
    ];
    Ok(Sample::of(&values)
        .with("sent", sent)
        .with("came back", carried))
}

fn turn_around(ns: &NetNs) -> Result<()> {
    let filter = format!(
        "filter add dev {TAP} ingress protocol ip u32 match u32 0 0 \
         action mirred egress redirect dev {TAP}"
    );
    for words in [format!("qdisc add dev {TAP} clsact"), filter] {
        let mut tc = Command::new("tc");
        tc.args(words.split_whitespace());
        let done = ns.output(tc)?;
        if !done.status.success() {
            bail!("tc {words}: {}", String::from_utf8_lossy(&done.stderr));
        }
    }
    Ok(())
}

fn ours(pairs: u8, line: &str) -> Result<Command> {
    let me = env::current_exe().context("find this program")?;
    let mut command = Command::new(me);
    command
        .args([VMM, &pairs.to_string(), line])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit());
    Ok(command)
}

fn qemu(ns: &NetNs, pairs: u8, line: &str) -> Result<Command> {
    let qemu = Qemu {
        boot: Boot {
            cpus: pairs,
            memory_mib: MEMORY_MIB,
            ..Boot::new(ns, line)
        },
        accelerator: Accelerator::Kvm,
        network: Network::Tap(TAP.to_owned(), MTU.into()),
    };
    let mut command = qemu.command()?;
    command.stderr(Stdio::null());
    Ok(command)
}

/// Result of a flood, and its CPU time in the VMM.
struct Flood {
    result: Value,
    cpu_ns: u64,
}

/// Reads the guest's output, and measures the VMM's threads from the boot line to the flood's
/// result.
fn watch(mut vmm: Child) -> Result<Flood> {
    let pid = vmm.id();
    let stdout = vmm.stdout.take().context("the VMM has no stdout")?;
    let (ended, waiting) = mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        if waiting.recv_timeout(TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            drop(vmm.kill());
        }
        vmm.wait()
    });
    let flood = read(pid, stdout);
    drop(ended);
    drop(watchdog.join());
    flood
}

fn read(pid: u32, stdout: impl Read) -> Result<Flood> {
    let (mut before, mut measured, mut said) = (0, None, String::new());
    for line in BufReader::new(stdout).lines() {
        let line = line.context("read the guest's console")?;
        said += &line;
        said.push('\n');
        let Ok(line) = serde_json::from_str::<Value>(&line) else {
            continue;
        };
        if line["boot"] == true {
            before = cpu_ns(pid)?;
        } else if line["workload"] == "flood" {
            measured = Some(Flood {
                cpu_ns: cpu_ns(pid)?.saturating_sub(before),
                result: line,
            });
        }
    }
    measured.with_context(|| format!("the guest did not flood:\n{said}"))
}

/// Returns the CPU time of a VMM's threads since their start, except those that run vCPUs, ns.
fn cpu_ns(pid: u32) -> Result<u64> {
    let folder = format!("/proc/{pid}/task");
    let tasks = fs::read_dir(&folder).with_context(|| format!("list {folder}"))?;
    let mut total = 0;
    for task in tasks {
        let task = task?.path();
        let name = fs::read_to_string(task.join("comm")).unwrap_or_default();
        // QEMU's are `CPU 0/KVM`, ours `vcpu0`.
        if name.starts_with("CPU ") || name.starts_with("vcpu") {
            continue;
        }
        let times = fs::read_to_string(task.join("schedstat")).unwrap_or_default();
        let on_cpu = times
            .split(' ')
            .next()
            .and_then(|ns| ns.parse::<u64>().ok());
        total += on_cpu.unwrap_or(0);
    }
    Ok(total)
}

/// Runs a guest if this program was started as a VMM; `None` otherwise.
pub(crate) fn as_vmm() -> Option<Result<()>> {
    let mut args = crate::role_arguments(VMM)?;
    Some((|| {
        let cpus = args.next().context("no number of CPUs")?;
        let line = args.next().context("no command line")?;
        run_machine(cpus.parse().context("the number of CPUs")?, line)
    })())
}

fn run_machine(cpus: u8, cmdline: String) -> Result<()> {
    let many = if cpus > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
    let queue = |_| open_queue(TAP, many).map(|(queue, _)| queue.into());
    let taps = (0..cpus).map(queue).collect::<Result<_, _>>()?;
    let open = |path: &str| File::options().read(true).write(true).open(path);
    let image = builtin_guest::image()?;
    let machine = Machine::new(MachineConfig {
        template: slipgate_vmm::cpuid::Template::Host,
        huge_pages: false,
        cpus,
        memory_bytes: u64::from(MEMORY_MIB) << 20,
        origin: Origin::Boot(BootSource {
            kernel: Kernel::File(File::open(image)?),
            initrd: None,
            cmdline,
        }),
        devices: Devices {
            net: Some(NetConfig::new(MAC, MTU, taps)),
            disks: Vec::new(),
            vsock: None,
            balloon: None,
            serial: SerialIo {
                input: None,
                limit_bytes: None,
                output: OwnedFd::from(File::options().write(true).open("/dev/stdout")?),
            },
        },
        kvm: open("/dev/kvm").context("open /dev/kvm")?.into(),
        threads: ThreadSetup::new(|_| Ok(())),
    })?;
    match machine.run() {
        Outcome::PoweredOff | Outcome::Reset | Outcome::GuestExit(0) => Ok(()),
        other => bail!("the guest ended otherwise: {other:?}"),
    }
}
