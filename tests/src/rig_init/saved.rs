//! A stock Linux under `slipgate run` that gives memory back, is saved while it counts, killed, and
//! restored: what it has in memory and on its disk goes on.
use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Error, Line, MicroVm, MicroVmEnd, PinDir, Result, World,
    error::Tried,
    rig::{
        Client, ClientReport, ClientServers, SAVED, SAVED_ECHO_PORT, SAVED_FREE, SAVED_ORDER_AT,
        SAVED_OVER, SavedCount,
    },
    servers::{TcpServer, TcpService},
    signal, slipgate,
    world::{SERVER, UPLINK},
};

/// A kernel under two emulations.
const PARAMETERS: &str = "console=ttyS0 quiet panic=-1 mitigations=off";
/// Several times the longest step, on a machine under load.
pub(crate) const WAIT: Duration = Duration::from_secs(240);
/// Memory that the guest is asked for, MiB.
const ASKED_MIB: u64 = 48;
/// Memory that has to come back of the 64 MiB that the guest frees, MiB. It reports whole blocks of
/// 2 MiB, and other memory of its own lies between.
const REPORTED_MIB: u64 = 32;
/// Memory that the guest may use meanwhile for what else it does, MiB.
const OTHER_MIB: u64 = 16;
/// Time for which there is no machine, at least: a clock that went on all the while is to be seen.
const AWAY: Duration = Duration::from_secs(8);
/// Deviation of two clocks that are read one after the other on a machine under load, seconds: less
/// than [`AWAY`].
const APART: f64 = 6.0;

/// Whether all is well; `None` when this machine is for something else.
pub(crate) fn run() -> Option<bool> {
    Path::new(SAVED).is_dir().then(|| match save_and_restore() {
        Ok(()) => true,
        Err(why) => {
            println!("FAILED saved {why}");
            false
        }
    })
}

fn save_and_restore() -> Result<()> {
    let rig = Rig::new()?;
    let mut first = rig.boot(&[])?;
    gives_memory_back(&rig, &mut first)?;
    let saved = rig.save_and_kill(first)?;
    let mut again = rig.restore(&saved)?;
    rig.until_over(&mut again)?;
    ends_well(again)
}

/// What both lives of the guest have.
pub(crate) struct Rig {
    pins: PinDir,
    disk: File,
    disk_path: String,
    nat: Vec<String>,
    world: World,
    _servers: ClientServers,
    _echo: TcpServer,
}

/// A guest that was saved.
struct Saved {
    dir: PathBuf,
    /// The last number that it had said.
    last: SavedCount,
    said_at: Instant,
    killed_at: Instant,
}

impl Rig {
    /// With a new disk for the guest.
    fn new() -> Result<Self> {
        make_disk(&at("disk"))?;
        Self::with_disk(&at("disk"))
    }

    /// With this disk.
    pub(crate) fn with_disk(disk: &str) -> Result<Self> {
        let client = Client::new();
        let world = World::new()?;
        let opened = File::options().write(true).open(disk);
        let opened = opened.tried("open the guest's disk")?;
        let echo = (SERVER, SAVED_ECHO_PORT);
        Ok(Self {
            pins: PinDir::new()?,
            disk: opened,
            disk_path: disk.to_owned(),
            nat: client.nat_flags(),
            _servers: client.serve(&world)?,
            _echo: TcpServer::start(&world.net, echo, TcpService::Echo)?,
            world,
        })
    }

    pub(crate) fn start(&self, name: &str, flags: &[&str]) -> Result<MicroVm> {
        let mut all = vec!["--uplink", UPLINK, "--name", name];
        all.extend(self.nat.iter().map(String::as_str));
        all.extend(flags);
        MicroVm::start(&self.world.host, &self.pins, &all)
    }

    /// Boots the guest, with these flags besides.
    pub(crate) fn boot(&self, more: &[&str]) -> Result<MicroVm> {
        let (kernel, initramfs) = (at("vmlinuz"), at("initramfs"));
        let flags = [
            &["--memory", "256", "--balloon", "--disk", &self.disk_path][..],
            &["--kernel", &kernel, "--initrd", &initramfs],
            &["--cmdline", PARAMETERS],
            more,
        ];
        self.start("first", &flags.concat())
    }

    /// Gives an order to the guest, by its disk.
    pub(crate) fn order(&self, order: &[u8]) -> Result<()> {
        let written = self.disk.write_all_at(order, SAVED_ORDER_AT);
        written.tried("write to the disk")
    }

    /// Runs `slipgate ARGS…` about a machine.
    pub(crate) fn slipgate(&self, args: &[&str]) -> Result<()> {
        let mut command = Command::new(slipgate::binary()?);
        command.args(args);
        self.world.host.output(command).map(drop)
    }

    /// Saves the guest twice: after the first time it goes on, and of the second only the differences are
    /// written. Then its VMM is killed.
    fn save_and_kill(&self, mut vm: MicroVm) -> Result<Saved> {
        let (base, dir) = (at("base"), at("snapshot"));
        let before = count(&mut vm)?;
        self.slipgate(&["snapshot", "first", &base])?;
        let after = count_beyond(&mut vm, before.number + 2)?;
        must(
            before.connection == "live" && after.connection == "live",
            || format!("the connection did not outlast a snapshot: {before:?}, {after:?}"),
        )?;
        println!("ok saved a connection goes on after a snapshot: {after:?}");
        // Or it would write to the disk after its memory was saved.
        self.slipgate(&["pause", "first"])?;
        let killed_at = Instant::now();
        self.slipgate(&["snapshot", "first", &dir, "--diff", &base])?;
        let (ended, (after, last)) = kill(vm)?;
        println!("ok saved, and killed: {}, {last:?}", ended.status);
        let started = Instant::now().checked_sub(ended.after);
        Ok(Saved {
            dir: dir.into(),
            last,
            said_at: started.map_or(killed_at, |started| started + after),
            killed_at,
        })
    }

    /// Restores the guest. Checks that it goes on with the next number, and its clock.
    fn restore(&self, saved: &Saved) -> Result<MicroVm> {
        sleep(AWAY.saturating_sub(saved.killed_at.elapsed()));
        let away = saved.killed_at.elapsed();
        let dir = saved.dir.display().to_string();
        let mut vm = self.start("again", &["--restore", &dir])?;
        let line = vm.await_line("counting ", WAIT)?;
        let since = saved.said_at.elapsed();
        let first = SavedCount::read(&line.text);
        let first = first.ok_or_else(|| Error::unexpected(format!("it said {line:?}")))?;
        // It may have said only a part of the line of one number when it was saved.
        let next = saved.last.number + 1;
        must((next..=next + 1).contains(&first.number), || {
            format!("it counted to {next} - 1, and then {first:?}")
        })?;
        println!("ok saved goes on: {first:?}");
        let seen = first.uptime - saved.last.uptime;
        let there = since.saturating_sub(away).as_secs_f64();
        must((0.0..there + APART).contains(&seen), || {
            format!(
                "its clock went on by {seen:.1} s, and it was there for {there:.1} s: {first:?}"
            )
        })?;
        println!(
            "ok saved clock: went on by {seen:.1} s, {:.1} s after",
            since.as_secs_f64()
        );
        // To the network it is another VM.
        must(first.connection == "ended", || {
            format!("a connection of the saved VM was not reset: {first:?}")
        })?;
        println!("ok saved connection: of the saved VM, reset at its next use");
        Ok(vm)
    }

    /// The restored guest takes its memory back and ends.
    fn until_over(&self, vm: &mut MicroVm) -> Result<()> {
        await_figure(vm, "again", "actual_bytes", |bytes| {
            bytes == ASKED_MIB << 20
        })?;
        self.slipgate(&["balloon", "again", "0"])?;
        await_figure(vm, "again", "actual_bytes", |bytes| bytes == 0)?;
        println!("ok saved balloon: goes on, and is taken back");
        self.order(SAVED_OVER)
    }
}

/// The guest reports memory that it has freed, and gives what it is asked for.
fn gives_memory_back(rig: &Rig, vm: &mut MicroVm) -> Result<()> {
    let counted = count_beyond(vm, 2)?;
    println!("ok saved counts: {counted:?}");
    let reported = figure(vm, "first", "reported_bytes")?;
    let used = resident_mib(vm)?;
    rig.order(SAVED_FREE)?;
    let goal = reported + (REPORTED_MIB << 20);
    await_figure(vm, "first", "reported_bytes", |bytes| bytes >= goal)?;
    // Linux also reports what has been free since its boot: the figure may grow before the order is read.
    let freed = await_resident(vm, (used + OTHER_MIB).saturating_sub(REPORTED_MIB))?;
    println!("ok saved reports: {used} MiB were there, then {freed} MiB");
    rig.slipgate(&["balloon", "first", &ASKED_MIB.to_string()])?;
    await_figure(vm, "first", "actual_bytes", |bytes| {
        bytes == ASKED_MIB << 20
    })?;
    // This Linux fills pages with zeroes when it takes them: they were all there for a moment.
    let given = resident_mib(vm)?;
    must(given <= freed + OTHER_MIB, || {
        format!("{freed} MiB were there before {ASKED_MIB} MiB were given, and {given} MiB after")
    })?;
    println!("ok saved gives: {ASKED_MIB} MiB, {given} MiB are there");
    Ok(())
}

/// Kills the VMM. Returns how the run ended, and the last number of the guest with the time of it.
pub(crate) fn kill(vm: MicroVm) -> Result<(MicroVmEnd, (Duration, SavedCount))> {
    let vmm = vm.vmm_pid();
    let none = || Error::unexpected("it has no VMM");
    signal(vmm.ok_or_else(none)?, libc::SIGKILL);
    let ended = vm.finish(WAIT)?;
    let counts = |line: &Line| Some((line.after, SavedCount::read(&line.text)?));
    let last = ended.lines.iter().rev().find_map(counts);
    let last = last.ok_or_else(|| Error::unexpected("it counted nothing"))?;
    let report = ClientReport::read(&text(&ended));
    must(report.failed.is_empty(), || format!("{report:?}"))?;
    Ok((ended, last))
}

/// Checks the end of a restored guest that was told to end.
pub(crate) fn ends_well(vm: MicroVm) -> Result<()> {
    let end = vm.finish(WAIT)?;
    let report = ClientReport::read(&text(&end));
    println!("{}{}", text(&end), end.stderr);
    let is_well = report.ended && report.failed.is_empty() && end.status.code() == Some(0);
    must(is_well, || {
        format!("the restored guest ended with {}: {report:?}", end.status)
    })
}

/// Makes a disk for a guest that begins to count.
pub(crate) fn make_disk(path: &str) -> Result<()> {
    let disk = File::create(path).tried("make a disk")?;
    disk.set_len(1 << 20).tried("make a disk")?;
    disk.write_all_at(b"0\n", 0).tried("write to the disk")
}

/// Where the machine has a file of this name.
fn at(name: &str) -> String {
    format!("{SAVED}/{name}")
}

pub(crate) fn must(is_so: bool, why: impl FnOnce() -> String) -> Result<()> {
    match is_so {
        true => Ok(()),
        false => Err(Error::unexpected(why())),
    }
}

/// The next number that the guest says.
pub(crate) fn count(vm: &mut MicroVm) -> Result<SavedCount> {
    count_beyond(vm, 0)
}

pub(crate) fn count_beyond(vm: &mut MicroVm, number: u32) -> Result<SavedCount> {
    loop {
        let line = vm.await_line("counting ", WAIT)?;
        let count = SavedCount::read(&line.text);
        let count = count.ok_or_else(|| Error::unexpected(format!("it said {line:?}")))?;
        if count.number > number {
            return Ok(count);
        }
    }
}

fn text(end: &MicroVmEnd) -> String {
    let lines = end.lines.iter().map(|line| format!("{}\n", line.text));
    lines.collect()
}

/// A figure of the balloon.
fn figure(vm: &MicroVm, name: &str, field: &str) -> Result<u64> {
    let output = vm.run(&["stats", "--json"])?;
    let stats: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let vms = stats["vms"].as_array().cloned().unwrap_or_default();
    let ours = vms.iter().find(|vm| vm["vm"] == name);
    let figure = ours.and_then(|vm| vm["vmm"]["balloon"][field].as_u64());
    figure.ok_or_else(|| Error::unexpected(format!("no balloon in {stats}")))
}

fn await_figure(vm: &MicroVm, name: &str, field: &str, is_it: impl Fn(u64) -> bool) -> Result<()> {
    let until = Instant::now() + WAIT;
    loop {
        match figure(vm, name, field)? {
            there if is_it(there) => return Ok(()),
            there if Instant::now() > until => {
                let why = format!("{field} stays at {there}");
                return Err(Error::unexpected(why));
            }
            _ => sleep(Duration::from_millis(200)),
        }
    }
}

/// Waits until at most this much of the VMM's memory is there, MiB. Returns how much is.
fn await_resident(vm: &MicroVm, most_mib: u64) -> Result<u64> {
    let until = Instant::now() + WAIT;
    loop {
        match resident_mib(vm)? {
            there if there <= most_mib => return Ok(there),
            there if Instant::now() > until => {
                let why = format!("{there} MiB of memory stay, and {most_mib} MiB were to be left");
                return Err(Error::unexpected(why));
            }
            _ => sleep(Duration::from_millis(200)),
        }
    }
}

/// Memory of the VMM that is anonymous and there, MiB.
fn resident_mib(vm: &MicroVm) -> Result<u64> {
    let none = || Error::unexpected("it has no VMM");
    let pid = vm.vmm_pid().ok_or_else(none)?;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).tried("look at the VMM")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.ok_or_else(none)? / 1024)
}
