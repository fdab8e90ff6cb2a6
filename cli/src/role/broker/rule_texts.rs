//! The rules' texts in `RULES`, for people: a flow's slot names its rule by number.
//!
//! Several processes share the array. Each takes a run of free elements for its rules, or the run
//! that has the same texts already (its predecessor's). A run is never given back while the maps
//! live, since flows may name it, unless the array is full: then elements that no flow names any
//! more are taken. A process that changes its rules takes such elements of its own first, but none
//! that it still judges by: two runs alternate.
use std::{collections::HashSet, fs::File, ops::Range, path::Path};

use anyhow::{Context as _, bail};
use slipgate_abi::{Verdict, maps::MAX_RULES};
use slipgate_control::maps::SharedMaps;

/// Writes the texts; where they begin. `run_dir` is locked meanwhile, against other processes that
/// start. `own`: runs that this process has had; `kept`: elements of its that are in use without a
/// flow, the rules in force and the forwards that relays know by number.
pub(super) fn write(
    maps: &SharedMaps,
    run_dir: &Path,
    texts: &[String],
    own: &[Range<u32>],
    kept: &[Range<u32>],
) -> anyhow::Result<u32> {
    let what = || format!("locking {}", run_dir.display());
    let dir = File::open(run_dir).with_context(what)?;
    dir.lock().with_context(what)?;
    let present: Vec<String> = (0..MAX_RULES)
        .map(|index| maps.rule(index).unwrap_or_default())
        .collect();
    let texts: Vec<&str> = texts
        .iter()
        .map(|text| &text[..text.floor_char_boundary(TEXT_BYTES)])
        .collect();
    // Elements that no flow names, of ours, then of anybody.
    let without = |free: &dyn Fn(u32) -> bool| -> Vec<String> {
        let mut named = named_by_flows(maps);
        named.extend(kept.iter().cloned().flatten());
        leaving(&present, |index| !free(index) || named.contains(&index))
    };
    let again = |left: Vec<String>| {
        let run = place(&left, &texts);
        run.inspect(|run| maps.forget_refusals_by(run.clone()))
    };
    let is_own = |index: u32| own.iter().any(|run| run.contains(&index));
    let same = same(&present, &texts);
    let run = match own {
        [] => same.or_else(|| place(&present, &texts)),
        _ => same.or_else(|| again(without(&is_own))),
    };
    let run = run.or_else(|| again(without(&|_| true)));
    let Some(run) = run else {
        bail!(
            "there are {} rules, and no room for them in the {MAX_RULES} that all slipgate \
             processes share: put long lists into one --deny-file, which is one rule",
            texts.len()
        );
    };
    for (index, text) in run.clone().zip(texts) {
        maps.set_rule(index, text);
    }
    Ok(run.start)
}

/// Size of an element, bytes.
const TEXT_BYTES: usize = size_of::<slipgate_abi::maps::RuleText>();

/// These texts but those of elements that may be taken.
fn leaving(present: &[String], stays: impl Fn(u32) -> bool) -> Vec<String> {
    let all = (0..).zip(present);
    all.map(|(index, text)| match stays(index) {
        true => text.clone(),
        false => String::new(),
    })
    .collect()
}

/// The first run that has these texts, else the first that is free.
fn place(present: &[String], texts: &[&str]) -> Option<Range<u32>> {
    let free = || first(present, texts, |run| run.iter().all(String::is_empty));
    same(present, texts).or_else(free)
}

/// The first run that has these texts.
fn same(present: &[String], texts: &[&str]) -> Option<Range<u32>> {
    first(present, texts, |run| {
        run.iter().zip(texts).all(|(a, b)| a == b)
    })
}

fn first(
    present: &[String],
    texts: &[&str],
    fits: impl Fn(&[String]) -> bool,
) -> Option<Range<u32>> {
    let start = present.windows(texts.len()).position(fits)?;
    let start = u32::try_from(start).ok()?;
    Some(start..start + u32::try_from(texts.len()).ok()?)
}

fn named_by_flows(maps: &SharedMaps) -> HashSet<u32> {
    use std::sync::atomic::Ordering::Relaxed;
    (0..maps.slots())
        .filter_map(|index| maps.slot(index))
        .filter(|slot| slot.verdict().load(Relaxed) != Verdict::Free as u32)
        .map(|slot| slot.rule())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn the_same_rules_are_found_again_and_others_go_where_it_is_free() {
        let present = texts(&["a", "b", "", "", ""]);
        assert_eq!(place(&present, &["a", "b"]), Some(0..2));
        assert_eq!(place(&present, &["b", "a"]), Some(2..4));
        assert_eq!(place(&present, &["x", "y", "z"]), Some(2..5));
        assert_eq!(place(&present, &["w", "x", "y", "z"]), None);
    }

    #[test]
    fn what_is_in_use_stays_and_two_runs_alternate() {
        let present = texts(&["old", "forward", "new", "named", "x"]);
        let in_force = 2..3;
        let stays = |index| in_force.contains(&index) || index == 1 || index == 3;
        let left = leaving(&present, stays);
        assert_eq!(left, texts(&["", "forward", "new", "named", ""]));
        assert_eq!(place(&left, &["next"]), Some(0..1));
        assert_eq!(place(&left, &["next", "other"]), None);
    }
}
