//! Tests of the bounds that hold for all VMs together.
use super::*;

/// A frame of many bytes, as many as fit in a GSO frame.
const FRAME_BYTES: usize = 64 << 10;
const ROOMY: Sleep = Sleep::MOST;

/// Holds as many frames for a VM as its policy lets it, and returns how many.
fn fill(sleeping: &mut Sleeping, row: u16) -> usize {
    let row = VmRow::new(row);
    sleeping.add(row, VmId::new(row.get().into()), false);
    let frame = vec![0; FRAME_BYTES];
    let held = std::iter::repeat_with(|| sleeping.hold(row, &frame, None, &ROOMY, 0));
    held.take_while(Result::is_ok).count()
}

#[test]
fn the_vms_share_a_bound_and_what_one_no_longer_needs_is_anybodys() {
    let mut sleeping = Sleeping::default();
    // Four would have room for all of it, but for what a frame takes besides its bytes.
    let counts: Vec<usize> = (1..=5).map(|row| fill(&mut sleeping, row)).collect();
    let held = counts.iter().sum::<usize>();
    assert_eq!(counts[..3], [counts[0]; 3], "each policy's own bound");
    assert!(counts[4] < counts[0], "{counts:?}");
    assert!(sleeping.bytes <= MOST_BYTES && held * FRAME_BYTES <= MOST_BYTES);
    assert!(sleeping.bytes + 2 * FRAME_BYTES > MOST_BYTES, "{counts:?}");
    assert_eq!(fill(&mut sleeping, 6), 0, "nothing is left");
    // One that wakes leaves as much as it had; so do one that is removed, and what expires.
    assert_eq!(sleeping.wake(VmRow::new(1)).len(), counts[0]);
    assert_eq!(fill(&mut sleeping, 6), counts[0]);
    assert_eq!(sleeping.forget(VmRow::new(2)).len(), counts[1]);
    assert_eq!(fill(&mut sleeping, 7), counts[1]);
    let late_ns = u64::from(ROOMY.patience_s) * SECOND_NS;
    let expired = std::iter::from_fn(|| sleeping.expire(late_ns)).count();
    assert_eq!((expired, sleeping.bytes), (held, 0));
    assert_eq!(sleeping.next_deadline_ns(), None);
    assert_eq!(fill(&mut sleeping, 6), counts[0]);
}

/// Small packets take more than their bytes.
#[test]
fn many_small_packets_do_not_take_more_memory_than_few_large_ones() {
    let mut sleeping = Sleeping::default();
    let mut frames = 0_usize;
    let mut row = 0;
    loop {
        row += 1;
        sleeping.add(VmRow::new(row), VmId::new(row.into()), false);
        let held = (0..ROOMY.packets)
            .take_while(|_| {
                let held = sleeping.hold(VmRow::new(row), &[0; 64], None, &ROOMY, 0);
                held.is_ok()
            })
            .count();
        if held == 0 {
            break;
        }
        frames += held;
    }
    let memory = frames * (64 + size_of::<HeldFrame>());
    assert!(memory <= MOST_BYTES, "{frames} frames, {memory} bytes");
    assert!(memory > MOST_BYTES / 2);
}
