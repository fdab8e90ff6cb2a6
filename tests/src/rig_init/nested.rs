//! A machine inside the machine: `slipgate run` boots a stock Linux client under the KVM that QEMU
//! emulates, on a NAT to the testbed's own world.

use std::{
    fs,
    io::{self, BufRead, BufReader, Write},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::Instant,
};

use slipgate_testbed::{
    Error, PinDir, Result, World,
    error::Tried,
    rig::{Client, ClientReport, NESTED},
    slipgate,
    world::UPLINK,
};

use crate::stuck;

/// A kernel under two emulations.
const PARAMETERS: &str = "console=ttyS0 quiet panic=-1 mitigations=off";

/// Whether all is well; `None` when this machine is for something else.
pub(crate) fn run() -> Option<bool> {
    let folder = Path::new(NESTED);
    folder.is_dir().then(|| match client(folder) {
        Ok(report) => report.is_whole(),
        Err(why) => {
            println!("FAILED nested {why}");
            false
        }
    })
}

/// Boots it; its console goes to the report as it comes.
fn client(folder: &Path) -> Result<ClientReport> {
    if !Path::new("/dev/kvm").exists() {
        return Err(Error::Missing("no /dev/kvm in the outer machine".into()));
    }
    let client = Client::new();
    let world = World::new()?;
    let _servers = client.serve(&world)?;
    let pins = PinDir::new()?;
    let report = folder.join("report.json");
    let mut command = Command::new(slipgate::binary()?);
    command
        .args(["run", "--tap", "vm0", "--uplink", UPLINK])
        .args(client.nat_flags())
        .args(["--cpus", "2", "--queues", "2", "--memory", "256"])
        .args(["--cmdline", PARAMETERS])
        .arg("--pin-dir")
        .arg(pins.path())
        .arg("--kernel")
        .arg(folder.join("vmlinuz"))
        .arg("--initrd")
        .arg(folder.join("initramfs"))
        .arg("--report")
        .arg(&report)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let started = Instant::now();
    let mut vm = world.host.spawn(command)?;
    let (out, err) = (vm.stdout.take(), vm.stderr.take());
    let errors = thread::spawn(move || {
        let lines = BufReader::new(err?).lines().map_while(Result::ok);
        Some(lines.collect::<Vec<_>>().join("\n"))
    });
    let (running, over) = mpsc::channel();
    let pid = vm.id();
    let watch = thread::spawn(move || stuck::watch(pid, &over));
    let mut console = String::new();
    for line in BufReader::new(out.into_iter().next().ok_or_else(no_pipe)?).lines() {
        let line = line.tried("read the guest's console")?;
        let line = line.trim_end();
        // A report that can't be written is missed by whoever reads it.
        let _ = writeln!(io::stdout(), "{line}");
        console.push_str(line);
        console.push('\n');
    }
    drop(running);
    let _ = watch.join();
    let status = vm.wait().tried("wait for `slipgate run`")?;
    let stderr = errors.join().ok().flatten().unwrap_or_default();
    println!("{stderr}");
    println!("{}", fs::read_to_string(&report).unwrap_or_default());
    println!("from start to end {:.1} s", started.elapsed().as_secs_f64());
    ended_well(status)?;
    Ok(ClientReport::read(&console))
}

fn ended_well(status: ExitStatus) -> Result<()> {
    match status.success() {
        true => Ok(()),
        false => Err(Error::unexpected(format!(
            "`slipgate run` ended with {status}"
        ))),
    }
}

fn no_pipe() -> Error {
    Error::unexpected("`slipgate run` has no stdout".to_owned())
}
