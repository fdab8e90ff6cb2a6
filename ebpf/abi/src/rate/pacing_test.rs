use super::{
    super::{
        RateLimits,
        tests::{START_NS, row, tx},
    },
    *,
};
use crate::DropReason;

/// The queue of a pacer: frames go in order, none before the tokens are not negative.
struct Htb {
    rate: u64,
    tokens_ns: i64,
    at_ns: u64,
}

impl Htb {
    /// Returns when a frame that comes at this time leaves.
    fn leaves_ns(&mut self, segments: Segments, now_ns: u64) -> u64 {
        let now_ns = now_ns.max(self.at_ns);
        let earned = self.tokens_ns + (now_ns - self.at_ns) as i64;
        let tokens_ns = earned.min(PACED_BURST_NS as i64);
        let waits_ns = (-tokens_ns).max(0);
        let frames = segments.bytes + ETHERNET_BYTES * segments.packets;
        let cost_ns = frames * SECOND_NS / self.rate;
        self.tokens_ns = tokens_ns + waits_ns - cost_ns as i64;
        self.at_ns = now_ns + waits_ns as u64;
        self.at_ns
    }
}

/// Whatever the sizes, a frame that the limit lets pass waits in the queue for no longer than the
/// limit says, so the queue has room for all.
#[test]
fn what_passes_waits_no_longer_than_the_limit_allows() {
    for rate in [1_250_000, 12_500_000, 125_000_000] {
        for sizes in [[1_500, 1_500], [100, 60], [1_500, 65_160], [590, 64_000]] {
            let mut limits = RateLimits::default();
            let row = row(&mut limits, tx(0, rate));
            row.set_pacer(Direction::Tx, 7);
            assert_eq!(row.pacer(Direction::Tx), 7);
            let mut queue = Htb {
                rate: pacer_rate(rate),
                tokens_ns: PACED_BURST_NS as i64,
                at_ns: START_NS,
            };
            let most_ns = paced_ahead_ns(rate) - PACED_BURST_NS;
            let (mut passed, mut refused, mut waited_ns) = (0, 0, 0);
            // Offered at four times the rate.
            let mut now_ns = START_NS;
            let until_ns = START_NS + 5 * paced_ahead_ns(rate);
            for i in 0.. {
                if now_ns > until_ns {
                    break;
                }
                let bytes: u64 = sizes[i % 2];
                let segments = Segments {
                    packets: bytes.div_ceil(1_500),
                    bytes,
                };
                now_ns += bytes * SECOND_NS / rate / 4;
                match row.take(Direction::Tx, segments, now_ns) {
                    Ok(()) => {
                        passed += bytes;
                        let waits_ns = queue.leaves_ns(segments, now_ns) - now_ns;
                        assert!(waits_ns <= most_ns, "{waits_ns} of {most_ns} ns");
                        waited_ns = waits_ns.max(waited_ns);
                    }
                    Err(reason) => {
                        assert_eq!(reason, DropReason::ByteRate);
                        refused += 1;
                    }
                }
            }
            assert!(refused > 0);
            // It is used.
            assert!(waited_ns > most_ns / 2, "{waited_ns} of {most_ns} ns");
            let allowed = (now_ns - START_NS + paced_ahead_ns(rate)) as u128 * u128::from(rate)
                / u128::from(SECOND_NS);
            assert!(
                u128::from(passed) <= allowed + 65_160,
                "{passed} of {allowed}"
            );
            if sizes == [1_500, 1_500] {
                assert!(
                    u128::from(passed) * 100 >= allowed * 97,
                    "{passed} of {allowed}"
                );
            }
        }
    }
}
