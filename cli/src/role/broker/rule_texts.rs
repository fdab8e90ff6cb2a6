//! The rules' texts in `RULES`, for people: a flow's slot names its rule by number.
//!
//! Several processes share the array. Each takes a run of free elements for its rules, or the run
//! that has the same texts already (its predecessor's). A run is never given back while the maps
//! live, since flows may name it, unless the array is full: then elements that no flow names any
//! more are taken. A process that changes its rules takes such elements of its own first, but none
//! that it still judges by: two runs alternate.
//!
//! What a process judges by it writes down in a file beside the locks (`<row>.rules`): none of that is
//! taken by another while it lives, whether flows name it or not.
use std::{
    collections::HashSet,
    fs::{self, File},
    ops::Range,
    path::PathBuf,
};

use anyhow::{Context as _, bail};
use slipgate_abi::{Verdict, maps::MAX_RULES};
use slipgate_control::{Paths, maps::SharedMaps, owner};

/// Whose texts are written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writer<'w> {
    pub(super) paths: &'w Paths,
    /// Its row in `OWNERS`.
    pub(super) row: u32,
    /// Runs that this process has had.
    pub(super) own: &'w [Range<u32>],
    /// Elements of its that are in use without a flow: the rules in force, and the forwards that
    /// relays know by number.
    pub(super) kept: &'w [Range<u32>],
}

/// Writes the texts; where they begin. The directory of the locks is locked meanwhile, against other
/// processes that do the same.
pub(super) fn write(
    maps: &SharedMaps,
    texts: &[String],
    writer: Writer<'_>,
) -> anyhow::Result<u32> {
    let Writer { own, kept, .. } = writer;
    let run_dir = &writer.paths.run_dir;
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
    let mut in_use = writer.of_others()?;
    in_use.extend(kept.iter().cloned().flatten());
    // Elements that no flow names, of ours, then of anybody.
    let without = |free: &dyn Fn(u32) -> bool| -> Vec<String> {
        let named = named_by_flows(maps);
        let stays = |index| !free(index) || named.contains(&index) || in_use.contains(&index);
        leaving(&present, stays)
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
        bail!(no_room(texts.len(), in_use.len(), own.is_empty()));
    };
    // Before the texts are: whoever comes after us sees the claim first.
    let mut claimed = vec![run.clone()];
    claimed.extend(kept.iter().cloned());
    writer.claim(&claimed)?;
    for (index, text) in run.clone().zip(texts) {
        maps.set_rule(index, text);
    }
    Ok(run.start)
}

fn no_room(texts: usize, in_use: usize, starts: bool) -> String {
    let left = MAX_RULES as usize - in_use.min(MAX_RULES as usize);
    let what = match starts {
        true => "",
        false => {
            " beside those in force, which stay until it is (restart slipgate with \
                  --on-exit keep, which keeps the flows and needs no such room)"
        }
    };
    format!(
        "there is no room for {texts} rules{what}: all slipgate processes of a network namespace \
         share {MAX_RULES}, of which {left} are not in force, and some of these are named by flows; \
         put long lists into one deny file, which is one rule"
    )
}

impl Writer<'_> {
    fn claims_of(&self, row: u32) -> PathBuf {
        self.paths.run_dir.join(format!("{row}.rules"))
    }

    /// Writes down what is in use by us.
    fn claim(&self, ranges: &[Range<u32>]) -> anyhow::Result<()> {
        let path = self.claims_of(self.row);
        let lines = ranges
            .iter()
            .map(|range| format!("{} {}\n", range.start, range.end));
        fs::write(&path, lines.collect::<String>())
            .with_context(|| format!("writing {}", path.display()))
    }

    /// What other processes that live have in use. Of a dead one only what flows name is.
    fn of_others(&self) -> anyhow::Result<HashSet<u32>> {
        let mut in_use = HashSet::new();
        for row in owner::living(self.paths)? {
            if row != self.row {
                // One that has none judges by no rules yet, or is of a version that writes none.
                let text = fs::read_to_string(self.claims_of(row)).unwrap_or_default();
                in_use.extend(ranges(&text).flatten());
            }
        }
        Ok(in_use)
    }
}

/// Those of a file of claims.
fn ranges(text: &str) -> impl Iterator<Item = Range<u32>> {
    text.lines().filter_map(|line| {
        let (start, end) = line.split_once(' ')?;
        let range = start.parse().ok()?..end.parse().ok()?;
        (range.end <= MAX_RULES).then_some(range)
    })
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
    use std::path::Path;

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

    fn paths(dir: &Path) -> Paths {
        Paths {
            pin_dir: dir.join("pins"),
            run_dir: dir.to_owned(),
        }
    }

    /// The process of row 3, which judges by nothing yet.
    fn third(paths: &Paths) -> Writer<'_> {
        Writer {
            paths,
            row: 3,
            own: &[],
            kept: &[],
        }
    }

    #[test]
    fn claims_are_read_as_they_are_written_and_nonsense_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let writer = third(&paths);
        writer.claim(&[4..9, 20..22]).unwrap();
        let text = fs::read_to_string(dir.path().join("3.rules")).unwrap();
        assert_eq!(ranges(&text).collect::<Vec<_>>(), [4..9, 20..22]);
        let bad = "x\n1\n1 x\n5 4294967295\n7 8\n1 4\n";
        assert_eq!(ranges(bad).collect::<Vec<_>>(), [7..8, 1..4]);
        // A dead process's hold nothing.
        let other = Writer { row: 4, ..writer };
        assert!(other.of_others().unwrap().is_empty());
    }

    #[test]
    fn a_living_process_keeps_what_it_judges_by() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let writer = third(&paths);
        writer.claim(&[4..6, 9..10]).unwrap();
        let lock = File::create(dir.path().join("owner-3.lock")).unwrap();
        lock.lock().unwrap();
        let other = Writer { row: 4, ..writer };
        assert_eq!(other.of_others().unwrap(), HashSet::from([4, 5, 9]));
        assert!(writer.of_others().unwrap().is_empty(), "its own");
        drop(lock);
        assert!(other.of_others().unwrap().is_empty(), "it is dead");
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
