//! What is served here already, and how much room is left.
use std::path::Path;

use slipgate_control::{ReadOnlyMaps, Sizes};

use super::{Finding, State};
use crate::brokers;

/// Reports on the slipgate of this network namespace, if there is one.
pub(super) fn found(pin_dir: &Path) -> Vec<Finding> {
    let mut findings = vec![attached(pin_dir)];
    findings.extend(room_found(pin_dir));
    findings
}

/// Reports whether a slipgate serves VMs here already.
fn attached(pin_dir: &Path) -> Finding {
    let what = "attached";
    let found = match brokers::paths(pin_dir).map(|paths| paths.pin_dir.try_exists()) {
        Ok(Ok(true)) => "yes: `slipgate stats` shows what",
        Ok(Ok(false)) => "nothing in this network namespace",
        Ok(Err(_)) | Err(_) => "unknown: pins are for root",
    };
    Finding::ok(what, found)
}

/// Reports how much room the maps have, where they are and can be read.
fn room_found(pin_dir: &Path) -> Option<Finding> {
    let paths = brokers::paths(pin_dir).ok()?;
    let maps = ReadOnlyMaps::open_pinned(&paths.pin_dir).ok()?;
    Some(room(
        maps.sizes(),
        maps.vms().count(),
        maps.rules_held(),
        maps.flows().count(),
    ))
}

/// `held`: elements of `RULES` that hold a rule, in force or not.
fn room(sizes: Sizes, vms: usize, held: usize, flows: usize) -> Finding {
    let found = format!(
        "{vms} of {} VMs, {held} of {} places for rules used so far, {flows} of {} flows",
        sizes.vms, sizes.rules, sizes.slots
    );
    let finding = Finding::ok("room", found);
    let nearly = |used: usize, most: u32| used >= most as usize / 8 * 7;
    let flags = match (nearly(vms, sizes.vms), nearly(flows, sizes.slots)) {
        (false, false) => return finding,
        (true, false) => "--max-vms",
        (false, true) => "--flow-table",
        (true, true) => "--max-vms and --flow-table",
    };
    let remedy = format!(
        "nearly full: give {flags} more, which takes effect when no slipgate process and no flow is \
         left here, or serve further VMs in another network namespace"
    );
    finding.with(State::Note, remedy)
}

#[cfg(test)]
#[path = "served_test.rs"]
mod tests;
