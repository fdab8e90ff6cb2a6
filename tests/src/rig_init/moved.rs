//! A stock Linux that moves between hosts: this machine saves it to a disk, or restores it from there.
use std::{ffi::CStr, fs, time::Duration};

use slipgate_testbed::{
    Error, Result,
    error::Tried,
    rig::{MOVED_PLAN, Move, MoveStep, SAVED_OVER},
};

use crate::{
    mount::{mount_from, unmount},
    saved::{Rig, WAIT, count, count_beyond, ends_well, kill, make_disk, must},
};

/// The disk that machines pass on.
const DEVICE: &CStr = c"/dev/vda";
const STORE: &CStr = c"/store";
const STORE_PATH: &str = "/store";
/// Each emulated machine measures the rate of its time-stamp counter itself, up to a thousandth off: the
/// same counter of the host below. KVM is to take them for the same, since TCG's SVM can't scale it.
const TSC_TOLERANCE: (&str, &str) = ("/sys/module/kvm/parameters/tsc_tolerance_ppm", "10000");
/// Exit status of a run whose flags can't be used.
const USAGE: i32 = 2;
const REFUSED_WITHIN: Duration = WAIT;

/// Whether all is well; `None` when this machine is for something else.
pub(crate) fn run() -> Option<bool> {
    let plan = fs::read_to_string(MOVED_PLAN).ok()?;
    match follow(&plan) {
        Ok(()) => Some(true),
        Err(why) => {
            println!("FAILED moved {why}");
            Some(false)
        }
    }
}

fn follow(plan: &str) -> Result<()> {
    let plan: Vec<Move> = serde_json::from_str(plan).map_err(Error::unexpected)?;
    fs::create_dir(STORE_PATH).tried("make a folder for the disk")?;
    mount_from(DEVICE, c"ext4", STORE)?;
    let (parameter, tolerance) = TSC_TOLERANCE;
    fs::write(parameter, tolerance).tried(format!("write to {parameter}"))?;
    for Move { template, step } in plan {
        let guest = Guest::of(&template);
        match step {
            MoveStep::Save => guest.save()?,
            MoveStep::Restore => guest.restore()?,
            MoveStep::Refuse(lacks) => guest.is_refused(&lacks)?,
        }
    }
    unmount(STORE)
}

/// A guest of a template, and what is kept of it.
struct Guest<'a> {
    template: &'a str,
    disk: String,
    snapshot: String,
    /// The last number that it had said.
    last: String,
}

impl<'a> Guest<'a> {
    fn of(template: &'a str) -> Self {
        let at = |name: &str| format!("{STORE_PATH}/{template}.{name}");
        Self {
            template,
            disk: at("disk"),
            snapshot: at("snapshot"),
            last: at("last"),
        }
    }

    fn save(&self) -> Result<()> {
        make_disk(&self.disk)?;
        let rig = Rig::with_disk(&self.disk)?;
        let mut vm = rig.boot(&["--cpu-template", self.template])?;
        count_beyond(&mut vm, 2)?;
        // Or it would write to the disk after its memory was saved.
        rig.slipgate(&["pause", "first"])?;
        rig.slipgate(&["snapshot", "first", &self.snapshot])?;
        let (_, (_, last)) = kill(vm)?;
        fs::write(&self.last, last.number.to_string()).tried("note the last number")?;
        println!("ok moved {} saved here: {last:?}", self.template);
        Ok(())
    }

    fn restore(&self) -> Result<()> {
        let last = fs::read_to_string(&self.last).tried("read the last number")?;
        let next = 1 + last.parse::<u32>().map_err(Error::unexpected)?;
        let rig = Rig::with_disk(&self.disk)?;
        let mut vm = rig.start("again", &["--restore", &self.snapshot])?;
        let first = count(&mut vm)?;
        // It may have said only a part of the line of one number when it was saved.
        must((next..=next + 1).contains(&first.number), || {
            format!("it counted to {next} - 1, and then {first:?}")
        })?;
        count_beyond(&mut vm, first.number + 5)?;
        rig.order(SAVED_OVER)?;
        ends_well(vm)?;
        println!("ok moved {} goes on here: {first:?}", self.template);
        Ok(())
    }

    fn is_refused(&self, lacks: &[String]) -> Result<()> {
        let rig = Rig::with_disk(&self.disk)?;
        let vm = rig.start("again", &["--restore", &self.snapshot])?;
        let end = vm.finish(REFUSED_WITHIN)?;
        let template = self.template;
        let (from, to) = (
            "this host's CPU or KVM lacks ",
            format!(" of the CPU template {template}"),
        );
        let said = end.stderr.split_once(from);
        let said = said.and_then(|(_, rest)| Some(rest.split_once(to.as_str())?.0));
        let names: Vec<&str> = said.unwrap_or_default().split(", ").collect();
        let is_said = lacks.iter().all(|it| names.contains(&it.as_str()));
        must(is_said && end.status.code() == Some(USAGE), || {
            format!("not refused for {lacks:?}: {}, {}", end.status, end.stderr)
        })?;
        println!("ok moved {template} is refused here: {names:?}");
        Ok(())
    }
}
