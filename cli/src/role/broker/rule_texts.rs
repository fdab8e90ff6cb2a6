//! The rules' texts in `RULES`, for people: a flow's slot names its rule by number.
//!
//! Several processes share the array. Each takes a run of free elements for its rules, or the run
//! that has the same texts already (its predecessor's). A run is never given back while the maps
//! live, since flows may name it, unless the array is full: then elements that no flow names any
//! more are taken.
use std::{collections::HashSet, fs::File, ops::Range, path::Path};

use anyhow::{Context as _, bail};
use slipgate_abi::{Verdict, maps::MAX_RULES};
use slipgate_control::maps::SharedMaps;

/// Writes the texts; where they begin. `run_dir` is locked meanwhile, against other processes that
/// start.
pub(super) fn write(maps: &SharedMaps, run_dir: &Path, texts: &[String]) -> anyhow::Result<u32> {
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
    let run = place(&present, &texts).or_else(|| {
        let named = named_by_flows(maps);
        let left: Vec<String> = (0..MAX_RULES)
            .zip(present)
            .map(|(index, text)| {
                if named.contains(&index) {
                    text
                } else {
                    String::new()
                }
            })
            .collect();
        place(&left, &texts).inspect(|run| maps.forget_refusals_by(run.clone()))
    });
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

/// The first run that has these texts, else the first that is free.
fn place(present: &[String], texts: &[&str]) -> Option<Range<u32>> {
    let first = |fits: &dyn Fn(&[String]) -> bool| present.windows(texts.len()).position(fits);
    let same = first(&|run: &[String]| run.iter().zip(texts).all(|(a, b)| a == b));
    let free = || first(&|run: &[String]| run.iter().all(String::is_empty));
    let start = u32::try_from(same.or_else(free)?).ok()?;
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
}
