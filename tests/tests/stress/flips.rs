//! Verdicts changed under way, as a policy would that looks into a flow and lets it go again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::JoinHandle,
    time::Duration,
};

use slipgate_abi::{SlotIndex, Verdict};
use slipgate_control::SharedMaps;
use slipgate_testbed::impairment::SplitMix64;

use super::below;

/// Flows that are changed at a time.
const AT_ONCE: usize = 8;

/// A thread that makes flows `Engine` for some milliseconds and `Fast` again.
pub(crate) struct Flips {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Flips {
    pub(crate) fn start(maps: SharedMaps, mut random: SplitMix64) -> Flips {
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut flips = 0;
            while !theirs.load(SeqCst) {
                flips += flip(&maps, &mut random);
            }
            flips
        });
        Flips { stop, thread }
    }

    /// Ends it, with all flows fast; how often a flow was changed.
    pub(crate) fn finish(self) -> u64 {
        self.stop.store(true, SeqCst);
        self.thread.join().unwrap()
    }
}

fn flip(maps: &SharedMaps, random: &mut SplitMix64) -> u64 {
    // By compare-and-swap: the slot's owner may begin its end at any time.
    let change = |index: SlotIndex, from: Verdict, to: Verdict| {
        let slot = maps.slot(index).expect("it is one of them");
        let verdict = slot.verdict();
        verdict
            .compare_exchange(from as u32, to as u32, SeqCst, SeqCst)
            .is_ok()
    };
    let fast: Vec<_> = maps
        .slot_indexes()
        .filter(|index| {
            let slot = maps.slot(*index).expect("it is one of them");
            slot.verdict().load(SeqCst) == Verdict::Fast as u32
        })
        .collect();
    let mut picked = Vec::new();
    for _ in 0..AT_ONCE.min(fast.len()) {
        let index = fast[below(random, fast.len() as u64) as usize];
        if change(index, Verdict::Fast, Verdict::Engine) {
            picked.push(index);
        }
    }
    std::thread::sleep(Duration::from_micros(500 + below(random, 4_000)));
    for index in &picked {
        change(*index, Verdict::Engine, Verdict::Fast);
    }
    picked.len() as u64
}
