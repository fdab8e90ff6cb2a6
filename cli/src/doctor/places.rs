//! Places of slipgate's programs at their hooks, where something is attached.
use std::path::Path;

use slipgate_control::attach::{
    Program,
    chain::{self, Standing},
};

use super::{Finding, State};
use crate::brokers;

const WHAT: &str = "hooks";
const REMEDY: &str = "slipgate takes its place back, unless it lost it too often (its log says so): have \
                      the other one attach behind slipgate (tcx: BPF_F_AFTER; tc filter: a pref above \
                      1), or not at this device";

/// Reports on devices at which slipgate's program is not the first; nothing where none is attached, or
/// where this user may not look.
pub(super) fn found(pin_dir: &Path) -> Vec<Finding> {
    let Ok(paths) = brokers::paths(pin_dir) else {
        return Vec::new();
    };
    if !paths.pin_dir.try_exists().unwrap_or(false) {
        return Vec::new();
    }
    match chain::examine(&paths) {
        Ok(places) => report(&places),
        Err(e) => vec![Finding::ok(WHAT, format!("unknown: {e}"))],
    }
}

fn report(places: &[(String, Program, Standing)]) -> Vec<Finding> {
    let displaced = places.iter().filter(|(.., standing)| !standing.is_first());
    let findings: Vec<_> = displaced
        .map(|(device, program, standing)| {
            let found = format!("{device}: {} {standing}", program.name());
            Finding::ok(WHAT, found).with(State::Note, REMEDY)
        })
        .collect();
    match (findings.is_empty(), places.len()) {
        (false, _) => findings,
        (true, 0) => Vec::new(),
        (true, count) => {
            let found = format!("slipgate's programs run first at each of {count} devices");
            vec![Finding::ok(WHAT, found)]
        }
    }
}

#[cfg(test)]
#[path = "places_test.rs"]
mod tests;
