use super::*;

const START_NS: u64 = 1_000 * SECOND_NS;

/// Simulates 60 s with `flood` forged packets a second, each sent once, and a hundred clients that
/// retry after 1, 3 and 7 s. Returns how many clients are admitted.
fn clients_let_in(rate: u32, flood: u64) -> usize {
    let mut world = WorldsRate::new(rate);
    let step_ns = SECOND_NS / flood;
    let mut asks: Vec<(u64, u64)> = Vec::new();
    for client in 0..100 {
        let first_ns = 20 * SECOND_NS + client * 200 * MILLISECOND_NS;
        asks.extend([0, 1, 3, 7].map(|wait| (first_ns + wait * SECOND_NS, client)));
    }
    asks.sort_unstable();
    let mut asks = asks.into_iter().peekable();
    let mut let_in = std::collections::HashSet::new();
    for forged in 0..60 * flood {
        let at_ns = forged * step_ns;
        world.take(("forged", forged), START_NS + at_ns);
        while let Some((ask_ns, client)) = asks.next_if(|(ask_ns, _)| *ask_ns <= at_ns) {
            if !let_in.contains(&client) && world.take(("client", client), START_NS + ask_ns) {
                let_in.insert(client);
            }
        }
    }
    let_in.len()
}

#[test]
fn who_asks_again_is_let_in_whatever_the_flood() {
    for (rate, flood) in [(75, 300), (75, 3_000), (1_500, 3_000), (1_500, 10_000)] {
        let clients = clients_let_in(rate, flood);
        assert!(clients >= 95, "{clients} of 100 at {flood}/s over {rate}/s");
    }
}

#[test]
fn the_rate_holds_to_the_token() {
    let mut world = WorldsRate::new(100);
    // A second's worth at once, and what comes in ten seconds; each asks eleven times.
    let mut taken = 0;
    for tenth in 0..100 {
        for packet in 0..1_000 {
            let now_ns = START_NS + tenth * 100 * MILLISECOND_NS;
            taken += u32::from(world.take(packet, now_ns));
        }
    }
    assert!((1_000..=1_100).contains(&taken), "{taken}");
}

#[test]
fn without_refusals_all_of_the_rate_is_anybodys() {
    let mut world = WorldsRate::new(8);
    let taken = (0..20).filter(|n| world.take(n, START_NS)).count();
    assert_eq!(taken, 8);
    // Refusals are forgotten after a while.
    let later_ns = START_NS + 61 * SECOND_NS;
    let taken = (0..20).filter(|n| world.take(n, later_ns)).count();
    assert_eq!((taken, world.marks.len()), (8, PLACES));
    world.take(0, later_ns + 61 * SECOND_NS);
    assert!(world.marks.is_empty());
}

#[test]
fn a_packet_that_a_link_doubled_has_not_asked_again() {
    let mut world = WorldsRate::new(8);
    for packet in 0..100 {
        world.take(packet, START_NS);
    }
    // One token has come since, which is kept.
    let soon_ns = START_NS + 130 * MILLISECOND_NS;
    assert!(!world.take(50, soon_ns));
    let again_ns = START_NS + 350 * MILLISECOND_NS;
    assert!(!world.take(777, again_ns), "a new one");
    assert!(world.take(50, again_ns));
}

#[test]
fn the_world_never_has_all_but_of_one() {
    let shares = [0, 1, 2, 3, 4, 8, 16_384, u32::MAX].map(worlds_share);
    assert_eq!(shares, [0, 1, 1, 2, 3, 6, 12_288, 3_221_225_471]);
}
