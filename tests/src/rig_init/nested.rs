//! Nested machines: a VMM boots a stock Linux client under the KVM that QEMU emulates, on a NAT to
//! the testbed's own world. By default `slipgate run` boots it once. Given an order of VMMs, each
//! boots the same client in turn, so that the failures of each can be counted.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Instant,
};

use slipgate_testbed::{
    Error, PinDir, Result, Slipgate, World, children_named,
    error::Tried,
    rig::{
        Client, NESTED, NESTED_DISK, NESTED_FIRMWARE, NESTED_ORDER, NestedEnd, NestedRun,
        NestedTraces, NestedVmm, QEMU, ROOT_WITNESS,
    },
    slipgate,
    world::UPLINK,
};

use crate::{
    limits::{KILLED, Limits, NOT_MADE},
    stuck,
};

/// A kernel under two emulations.
const PARAMETERS: &str = "console=ttyS0 quiet panic=-1 mitigations=off";
/// The same of a kernel that has its root on the disk by itself.
const PARAMETERS_OF_ROOT: &str = "root=/dev/vda rw";
const TAP: &str = "vm0";
/// A block of a file system begins with one.
const SECTOR_BYTES: usize = 512;

/// Whether all is well; `None` when this machine is for something else.
pub(crate) fn run() -> Option<bool> {
    Path::new(NESTED).is_dir().then(|| {
        let mut well = true;
        for (vmm, number) in order().into_iter().zip(1..) {
            let mut run = NestedRun {
                number,
                vmm,
                end: None,
                seconds: 0.0,
            };
            println!("{run}");
            let started = Instant::now();
            let end = boot(vmm).unwrap_or_else(|why| {
                println!("FAILED nested {why}");
                NestedEnd::Other
            });
            well &= end == NestedEnd::Passed;
            run.seconds = started.elapsed().as_secs_f64();
            run.end = Some(end);
            println!("{run}");
        }
        well
    })
}

fn order() -> Vec<NestedVmm> {
    let Ok(names) = fs::read_to_string(NESTED_ORDER) else {
        return vec![NestedVmm::Slipgate];
    };
    let vmm = |name: &str| match name {
        "qemu" => NestedVmm::Qemu,
        _ => NestedVmm::Slipgate,
    };
    names.split_whitespace().map(vmm).collect()
}

/// Boots the client by `vmm`. Its console goes to the report as it comes.
fn boot(vmm: NestedVmm) -> Result<NestedEnd> {
    if !Path::new("/dev/kvm").exists() {
        return Err(Error::Missing("no /dev/kvm in the outer machine".into()));
    }
    let client = Client::new();
    let world = World::new()?;
    let _servers = client.serve(&world)?;
    let pins = PinDir::new()?;
    let kernel = Path::new(NESTED).join("vmlinuz");
    let initramfs = Path::new(NESTED).join("initramfs");
    let report = Path::new(NESTED).join("report.json");
    let mut nat = None;
    let limits = Limits::make()?;
    let has_initramfs = initramfs.exists();
    let parameters = match has_initramfs {
        true => PARAMETERS.to_owned(),
        false => format!("{PARAMETERS} {PARAMETERS_OF_ROOT}"),
    };
    let run = |limits: &[String]| {
        let mut command = Command::new(slipgate::binary()?);
        command
            .args(["run", "--tap", TAP, "--uplink", UPLINK])
            .args(client.nat_flags())
            .args(["--cpus", "2", "--queues", "2", "--memory", "256"])
            .args(["--cmdline", &parameters])
            .arg("--pin-dir")
            .arg(pins.path())
            .arg("--kernel")
            .arg(&kernel)
            .arg("--report")
            .arg(&report)
            .args(limits)
            .stdin(Stdio::null());
        if has_initramfs {
            command.arg("--initrd").arg(&initramfs);
        }
        if Path::new(NESTED_DISK).exists() {
            command.args(["--disk", NESTED_DISK]);
        }
        Ok::<_, Error>(command)
    };
    let mut command = match vmm {
        NestedVmm::Slipgate => run(&limits.flags())?,
        NestedVmm::Qemu => {
            let made = format!("tuntap add {TAP} mode tap multi_queue vnet_hdr");
            world.host.ip(&made)?;
            let flags = client.nat_flags();
            let mut args = vec!["--tap", TAP, "--uplink", UPLINK];
            args.extend(flags.iter().map(String::as_str));
            nat = Some(Slipgate::attach(&world.host, &pins, &args)?);
            let net = format!("tap,id=n,ifname={TAP},script=no,downscript=no,vhost=off,queues=2");
            let mut command = Command::new(QEMU);
            command
                .args(["-L", NESTED_FIRMWARE, "-M", "q35", "-accel", "kvm"])
                .args(["-cpu", "qemu64", "-smp", "2", "-m", "256"])
                .args(["-nodefaults", "-display", "none", "-no-reboot"])
                .args(["-serial", "stdio", "-netdev", &net, "-device"])
                .arg("virtio-net-pci,netdev=n,mq=on,vectors=6,romfile=")
                .args(["-append", PARAMETERS])
                .arg("-kernel")
                .arg(&kernel)
                .arg("-initrd")
                .arg(&initramfs);
            command
        }
    };
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let started = Instant::now();
    let mut running = world.host.spawn(command)?;
    let (out, err) = (running.stdout.take(), running.stderr.take());
    let errors = thread::spawn(move || {
        let mut text = Vec::new();
        // What could not be read is not told.
        let _ = err.map(|mut err| err.read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });
    let (alive, heard) = mpsc::channel();
    let pid = running.id();
    let watch = thread::spawn(move || stuck::watch(pid, &heard));
    let mut console = String::new();
    let mut kept = None;
    for line in BufReader::new(out.into_iter().next().ok_or_else(no_pipe)?).split(b'\n') {
        let line = line.tried("read the guest's console")?;
        let line = String::from_utf8_lossy(&line);
        let line = line.trim_end();
        println!("{line}");
        // Who was to hear it may have given up.
        let _ = alive.send(());
        if vmm == NestedVmm::Slipgate && has_initramfs {
            kept.get_or_insert_with(|| limits.check_running().and_then(|()| check_jail(pid)));
        }
        console.push_str(line);
        console.push('\n');
    }
    drop(alive);
    let timed_out = watch.join().unwrap_or(true);
    let status = running.wait().tried("wait for the VMM")?;
    let mut stderr = errors.join().unwrap_or_default();
    if let Some(nat) = nat {
        stderr.push_str(&nat.stderr());
    }
    println!("{stderr}");
    println!("{}", fs::read_to_string(&report).unwrap_or_default());
    let seconds = started.elapsed().as_secs_f64();
    println!("{vmm:?} ended with {status} after {seconds:.1} s");
    // The next run has one of its own, or none.
    let _ = fs::remove_file(&report);
    let end = NestedEnd::of(
        vmm,
        NestedTraces {
            console: &console,
            stderr: &stderr,
            status: status.code(),
            timed_out,
        },
    );
    if end == NestedEnd::Passed && !has_witness()? {
        println!("FAILED root the disk has not what its programs have written");
        return Ok(NestedEnd::CheckFailed);
    }
    // A guest that broke down says nothing of its VMM's limits, and a kernel without modules may be
    // smaller than they are.
    if end == NestedEnd::Passed && vmm == NestedVmm::Slipgate && has_initramfs {
        kept.unwrap_or(Ok(()))?;
        limits.check_left()?;
        let killed = run(&limits.flags_that_kill())?;
        let killed = world.host.output_with(killed, &KILLED)?;
        let stderr = String::from_utf8_lossy(&killed.stderr);
        limits.check_killed(killed.status.code(), &stderr)?;
        let not_made = run(&limits.flags_of_few_threads())?;
        let not_made = world.host.output_with(not_made, &NOT_MADE)?;
        let stderr = String::from_utf8_lossy(&not_made.stderr);
        limits.check_not_made(not_made.status.code(), &stderr)?;
        let mut slow = run(&limits.flags_that_throttle())?;
        slow.stdout(Stdio::null()).stderr(Stdio::piped());
        limits.check_throttled(world.host.spawn(slow)?)?;
    }
    Ok(end)
}

/// Checks the jail of the VMM of this run. The machine's root is an initial RAM file system, so it is
/// covered.
fn check_jail(broker: u32) -> Result<()> {
    let vmm = children_named(broker, "slipgate-vmm").pop();
    let vmm = vmm.ok_or_else(|| Error::unexpected("it has no VMM"))?;
    let of = |name: &str| format!("/proc/{vmm}/{name}");
    let entries = fs::read_dir(of("root")).tried("look at the VMM's root")?;
    let mounts = fs::read_to_string(of("mountinfo")).tried("look at the VMM's mounts")?;
    if entries.count() > 0 || mounts.lines().count() != 1 {
        let what = format!("the VMM's root is not empty, or not the only one:\n{mounts}");
        return Err(Error::unexpected(what));
    }
    println!("jail: the machine's root is covered, and the VMM's is empty");
    Ok(())
}

/// Whether the guest's root has what its programs write there, if it has a root on a disk.
fn has_witness() -> Result<bool> {
    if !Path::new(NESTED_DISK).exists() {
        return Ok(true);
    }
    let image = fs::read(NESTED_DISK).tried("read the guest's disk")?;
    let mut blocks = image.chunks(SECTOR_BYTES);
    Ok(blocks.any(|block| block.starts_with(ROOT_WITNESS)))
}

fn no_pipe() -> Error {
    Error::unexpected("the VMM has no stdout".to_owned())
}
