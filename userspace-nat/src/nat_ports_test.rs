use std::collections::HashSet;

use slipgate_abi::VmId;

use proptest::prelude::*;

use super::*;
use crate::clock::SECOND_NS;

fn to(n: u8) -> Destination {
    to_port(n, 443)
}

fn to_port(n: u8, remote_port: u16) -> Destination {
    Destination {
        nat: IpAddr::from([192, 0, 2, 1]),
        remote: IpAddr::from([198, 51, 100, n]),
        remote_port,
        protocol: Protocol::Tcp,
    }
}

fn pool(range: RangeInclusive<u16>) -> PortPool {
    PortPool::with_rng(range, SmallRng::seed_from_u64(1))
}

#[test]
fn gives_out_the_whole_range_once_per_destination() {
    let mut pool = pool(DEFAULT_RANGE);
    for n in 0..3 {
        let ports: HashSet<u16> =
            std::iter::from_fn(|| pool.pick(to(n), VmId::new(1), false, 0)).collect();
        assert_eq!(ports.len(), 4_536);
        assert!(ports.iter().all(|p| DEFAULT_RANGE.contains(p)));
    }
}

#[test]
fn rfc6888_req_8_a_freed_port_rests_120_seconds() {
    let mut pool = pool(61_000..=61_000);
    let port = pool.pick(to(1), VmId::new(1), false, 0).unwrap();
    pool.free(to(1), port, VmId::new(1), Freed::Rests, SECOND_NS);
    pool.wake(120 * SECOND_NS);
    assert_eq!(pool.pick(to(1), VmId::new(1), false, 0), None);
    pool.wake(121 * SECOND_NS);
    assert_eq!(pool.pick(to(1), VmId::new(1), false, 0), Some(port));
}

#[test]
fn rfc6888_req_8_a_safely_closed_port_is_free_at_once() {
    let mut pool = pool(61_000..=61_000);
    let port = pool.pick(to(1), VmId::new(1), false, 0).unwrap();
    pool.free(to(1), port, VmId::new(1), Freed::Safe, 0);
    assert_eq!(pool.pick(to(1), VmId::new(1), false, 0), Some(port));
}

#[test]
fn a_port_that_the_host_keeps_in_time_wait_rests_as_long_and_no_longer() {
    let (one, other) = (VmId::new(1), VmId::new(2));
    let mut pool = pool(61_000..=61_001);
    // The guest closed first, which the host minds only where it has said so.
    let port = pool.pick(to(1), one, true, 0).unwrap();
    pool.free(to(1), port, one, Freed::GuestFirst, 0);
    assert_eq!(pool.busy(&to(1)), 0);
    // Another kind of rest does not delay the end of these.
    let rests = pool.pick(to(2), one, true, 0).unwrap();
    pool.free(to(2), rests, one, Freed::Rests, 0);
    let refused = pool.pick(to(1), one, true, 0).unwrap();
    pool.free(to(1), refused, one, Freed::HostWaits, SECOND_NS);
    let port = pool.pick(to(1), one, true, SECOND_NS).unwrap();
    assert_ne!(port, refused);
    pool.free(to(1), port, one, Freed::GuestFirst, 2 * SECOND_NS);
    let given_back = GivenBack {
        port,
        vm: one,
        how: Freed::GuestFirst,
        is_reclaimed: true,
    };
    for vm in [one, other] {
        let now_ns = HOST_WAIT_NS;
        assert_eq!(pool.pick(to(1), vm, true, now_ns), None);
        assert!(!pool.take(to(1), port, vm));
        assert!(!pool.has_port(to(1), vm, true, now_ns, &[given_back]));
    }
    assert!(pool.has_port(to(3), one, true, 0, &[]));
    pool.wake(SECOND_NS + HOST_WAIT_NS);
    assert_eq!(pool.pick(to(1), one, false, 0), Some(refused));
    assert_eq!(pool.pick(to(1), one, true, 0), None);
    pool.free(to(1), refused, one, Freed::Safe, 0);
    pool.wake(2 * SECOND_NS + HOST_WAIT_NS);
    assert_eq!(pool.sizes(), (1, 1), "only the other kind");
    // With the last rest the host's word is forgotten: it may have another setting by now.
    let port = pool.pick(to(1), one, true, 0).unwrap();
    pool.free(to(1), port, one, Freed::GuestFirst, 0);
    assert_eq!(pool.busy(&to(1)), 0);
}

#[test]
fn a_destinations_only_port_is_kept_as_any_other() {
    let (one, other) = (VmId::new(1), VmId::new(2));
    let mut pool = pool(61_000..=61_001);
    let port = pool.pick(to(1), one, false, 0).unwrap();
    assert_eq!((pool.busy(&to(1)), pool.sizes()), (1, (1, 0)));
    // Another port's end is not its, and who has it keeps it.
    let unused = if port == 61_000 { 61_001 } else { 61_000 };
    pool.free(to(1), unused, one, Freed::Safe, 0);
    assert_eq!(pool.busy(&to(1)), 1);
    pool.mark(to(1), port, other);
    assert_eq!(pool.busy(&to(1)), 1);
    assert_eq!(pool.pick(to(1), other, false, 0), Some(unused));
    assert_eq!(pool.pick(to(1), other, false, 0), None);
    pool.put_back(to(1), unused, other);
    pool.free(to(1), port, one, Freed::Safe, 0);
    assert_eq!(pool.sizes(), (0, 0));
    // What a predecessor's flow has, alone or not.
    pool.mark(to(2), 61_000, one);
    pool.mark(to(2), 61_001, one);
    assert_eq!((pool.busy(&to(2)), pool.busy(&to(1))), (2, 0));
    pool.free(to(2), 61_000, one, Freed::Rests, 0);
    assert_eq!(pool.pick(to(2), one, true, 0), Some(61_000));
}

#[test]
fn rfc6191_the_same_vm_with_timestamps_takes_a_resting_port() {
    let mut pool = pool(61_000..=61_001);
    for _ in 0..2 {
        let port = pool.pick(to(1), VmId::new(7), false, 0).unwrap();
        pool.free(to(1), port, VmId::new(7), Freed::Rests, 0);
    }
    assert_eq!(
        pool.pick(to(1), VmId::new(1), false, 0),
        None,
        "without timestamps"
    );
    assert_eq!(pool.pick(to(1), VmId::new(8), true, 0), None, "another VM");
    assert!(pool.pick(to(1), VmId::new(7), true, 0).is_some());
    assert!(pool.pick(to(1), VmId::new(7), true, 0).is_some());
    assert_eq!(pool.pick(to(1), VmId::new(7), true, 0), None);
    // The rests of ports that were taken early do not free them.
    pool.wake(500 * SECOND_NS);
    assert_eq!(pool.pick(to(1), VmId::new(1), false, 0), None);
}

#[test]
fn a_port_that_was_taken_early_has_its_next_rest_whole() {
    let mut pool = pool(61_000..=61_000);
    let port = pool.pick(to(1), VmId::new(7), false, 0).unwrap();
    pool.free(to(1), port, VmId::new(7), Freed::Rests, 0);
    assert_eq!(
        pool.pick(to(1), VmId::new(7), true, 10 * SECOND_NS),
        Some(port),
        "early"
    );
    pool.free(to(1), port, VmId::new(7), Freed::Rests, 115 * SECOND_NS);
    // When the first rest would have been over.
    pool.wake(120 * SECOND_NS);
    assert_eq!(pool.busy(&to(1)), 1);
    pool.wake(234 * SECOND_NS);
    assert_eq!(pool.pick(to(1), VmId::new(1), false, 234 * SECOND_NS), None);
    pool.wake(235 * SECOND_NS);
    assert_eq!(pool.sizes(), (0, 0));
}

#[test]
fn a_port_that_was_picked_and_not_used_is_as_it_was() {
    let mut pool = pool(61_000..=61_001);
    let rests = pool.pick(to(1), VmId::new(7), false, 0).unwrap();
    pool.free(to(1), rests, VmId::new(7), Freed::Rests, 0);
    let unused = pool.pick(to(1), VmId::new(7), false, 0).unwrap();
    pool.put_back(to(1), unused, VmId::new(7));
    assert_eq!(pool.pick(to(1), VmId::new(7), false, 0), Some(unused));
    assert_eq!(
        pool.pick(to(1), VmId::new(7), true, SECOND_NS),
        Some(rests),
        "early"
    );
    pool.put_back(to(1), rests, VmId::new(7));
    assert_eq!(
        pool.pick(to(1), VmId::new(8), true, SECOND_NS),
        None,
        "another VM"
    );
    pool.wake(119 * SECOND_NS);
    assert_eq!(pool.busy(&to(1)), 2);
    pool.wake(120 * SECOND_NS);
    assert_eq!(pool.pick(to(1), VmId::new(8), false, 0), Some(rests));
}

#[test]
fn a_port_that_rests_for_others_rests_ten_seconds_for_its_own_vm() {
    let mut pool = pool(61_000..=61_000);
    let port = pool.pick(to(1), VmId::new(7), false, 0).unwrap();
    pool.free(to(1), port, VmId::new(7), Freed::RestsForOthers, SECOND_NS);
    let mut pick = |vm, now_s| pool.pick(to(1), vm, false, now_s * SECOND_NS);
    assert_eq!(pick(VmId::new(7), 10), None);
    assert_eq!(pick(VmId::new(8), 11), None, "another VM");
    assert_eq!(pick(VmId::new(7), 11), Some(port));
    // But where it was given back for that.
    pool.free(
        to(1),
        port,
        VmId::new(7),
        Freed::RestsForOthers,
        12 * SECOND_NS,
    );
    assert!(!pool.take(to(1), port, VmId::new(8)));
    assert!(pool.take(to(1), port, VmId::new(7)));
    assert!(!pool.take(to(1), port, VmId::new(7)), "it is in use");
}

#[test]
fn an_inspected_flows_port_rests_to_the_end() {
    let mut pool = pool(61_000..=61_000);
    let port = pool.pick(to(1), VmId::new(7), false, 0).unwrap();
    pool.free(to(1), port, VmId::new(7), Freed::Inspected, 0);
    assert_eq!(pool.pick(to(1), VmId::new(7), true, 119 * SECOND_NS), None);
    assert!(!pool.take(to(1), port, VmId::new(7)));
    // As many others as may rest do not end it.
    for n in 0..=MAX_RESTING {
        let to = Destination {
            remote_port: 1_000 + (n % 60_000) as u16,
            ..to((n / 60_000) as u8 + 2)
        };
        let port = pool.pick(to, VmId::new(7), false, 0).unwrap();
        pool.free(to, port, VmId::new(7), Freed::Rests, 1);
    }
    assert_eq!(pool.sizes().1, MAX_RESTING + 1);
    assert_eq!(pool.busy(&to(1)), 1);
    pool.wake(120 * SECOND_NS);
    assert_eq!(
        pool.pick(to(1), VmId::new(7), false, 120 * SECOND_NS),
        Some(port)
    );
}

#[test]
fn a_vm_leaves_the_others_rests_of_inspected_flows() {
    let mut pool = pool(61_000..=61_000);
    pool.share_among(2);
    let mut rest = |vm: VmId| {
        let mut rested = 0;
        while pool.may_inspect(vm) {
            let to = Destination {
                remote_port: 1_000 + (rested % 60_000) as u16,
                ..to((rested / 60_000 + vm.get() as usize * 10) as u8)
            };
            let port = pool.pick(to, vm, false, 0).unwrap();
            pool.free(to, port, vm, Freed::Inspected, 0);
            rested += 1;
        }
        rested
    };
    assert_eq!(rest(VmId::new(1)), MAX_RESTING / 4 * 3);
    assert_eq!(rest(VmId::new(2)), MAX_RESTING / 8);
    assert_eq!(rest(VmId::new(1)), 0);
    while !pool.wake(120 * SECOND_NS) {}
    assert!(pool.may_inspect(VmId::new(1)));
    assert_eq!(pool.sizes(), (0, 0));
}

/// Pearson's chi-square of offsets below [`SIZE`], over [`BINS`] bins.
fn chi_square(offsets: impl Iterator<Item = usize>) -> f64 {
    let mut bins = [0_u32; BINS];
    offsets.for_each(|offset| bins[offset * BINS / SIZE] += 1);
    let expected = f64::from(bins.iter().sum::<u32>()) / BINS as f64;
    let square = |seen: &u32| (f64::from(*seen) - expected).powi(2) / expected;
    bins.iter().map(square).sum()
}

const SIZE: usize = 4_536;
const BINS: usize = 64;
/// 63 degrees of freedom have a mean of 63 and a deviation of 11.2: random numbers come here once
/// in 10⁹ tries.
const MOST_CHI_SQUARE: f64 = 140.0;
/// How many ports back a port must tell nothing about.
const LAGS: usize = 16;

/// Statistics by which the ports differ from random ones: of the values, and of the difference from
/// each to the one `lag` later.
fn what_is_not_random(ports: &[u16]) -> Vec<String> {
    let offsets: Vec<usize> = ports
        .iter()
        .map(|port| usize::from(port - DEFAULT_RANGE.start()))
        .collect();
    let values = (0, chi_square(offsets.iter().copied()));
    let steps = (1..=LAGS).map(|lag| {
        let step = |(at, earlier): (usize, &usize)| (offsets[at + lag] + SIZE - earlier) % SIZE;
        let earlier = offsets[..offsets.len() - lag].iter().enumerate();
        (lag, chi_square(earlier.map(step)))
    });
    std::iter::once(values)
        .chain(steps)
        .filter(|(_, chi_square)| *chi_square > MOST_CHI_SQUARE)
        .map(|(lag, chi_square)| format!("lag {lag}: {chi_square:.0}"))
        .collect()
}

const NONE: [String; 0] = [];

#[test]
fn rfc6056_ports_are_random() {
    // Each for a destination of its own: what one guest sees that talks to many.
    let mut many = pool(DEFAULT_RANGE);
    let ports: Vec<u16> = (0..20_000)
        .filter_map(|n| many.pick(to_port((n % 200) as u8, n / 200), VmId::new(1), false, 0))
        .collect();
    assert_eq!(ports.len(), 20_000);
    assert_eq!(what_is_not_random(&ports), NONE);
    // One destination, half of whose ports are taken and each freed in a while.
    let mut one = pool(DEFAULT_RANGE);
    let mut out = VecDeque::new();
    let ports: Vec<u16> = (0..20_000)
        .filter_map(|_| {
            if out.len() == SIZE / 2 {
                let first = out.pop_front()?;
                one.free(to(1), first, VmId::new(1), Freed::Safe, 0);
            }
            let port = one.pick(to(1), VmId::new(1), false, 0)?;
            out.push_back(port);
            Some(port)
        })
        .collect();
    assert_eq!(ports.len(), 20_000);
    assert_eq!(what_is_not_random(&ports), NONE);
    // And no two pools draw the same.
    let first_of_its_own = || {
        let mut pool = PortPool::new(DEFAULT_RANGE);
        (0..8)
            .map(|n| pool.pick(to(n), VmId::new(1), false, 0))
            .collect::<Vec<_>>()
    };
    assert_ne!(first_of_its_own(), first_of_its_own());
}

/// The measure by itself: what must not pass for random.
#[test]
fn ports_that_could_be_guessed_are_told_from_random_ones() {
    let mut rng = SmallRng::seed_from_u64(2);
    let mut random = |below: usize| random_below(&mut rng, below);
    type Offset = Box<dyn FnMut(usize) -> usize>;
    let offsets: [(&str, Offset); 7] = [
        ("a sequence", Box::new(|n| n)),
        ("a stride", Box::new(|n| n * 1_009)),
        (
            "two strides in turn",
            Box::new(|n| n / 2 * 13 + n % 2 * 2_000),
        ),
        ("eight sequences in turn", Box::new(|n| n % 8 * 567 + n / 8)),
        ("a small window", Box::new(|n| random_in(n, 256))),
        (
            "a window that moves",
            Box::new(|n| n * 3 + random_in(n, 64)),
        ),
        ("half of the range", Box::new(|n| random_in(n, SIZE / 2))),
    ];
    for (what, mut offset) in offsets {
        let port = |n| DEFAULT_RANGE.start() + (offset(n) % SIZE) as u16;
        let ports: Vec<u16> = (0..20_000).map(port).collect();
        assert_ne!(what_is_not_random(&ports), NONE, "{what}");
    }
    let port = |_| DEFAULT_RANGE.start() + random(SIZE) as u16;
    let ports: Vec<u16> = (0..20_000).map(port).collect();
    assert_eq!(what_is_not_random(&ports), NONE);
}

/// The `n`th random number of some generator.
fn random_in(n: usize, below: usize) -> usize {
    random_below(&mut SmallRng::seed_from_u64(n as u64), below)
}

#[test]
fn reserved_ports_are_left_alone() {
    let mut pool = pool(61_000..=61_009);
    pool.set_reserved((61_000..61_005).map(|p| (Protocol::Tcp, p)));
    let ports: HashSet<u16> =
        std::iter::from_fn(|| pool.pick(to(1), VmId::new(1), false, 0)).collect();
    assert_eq!(ports, (61_005..=61_009).collect());
}

#[test]
fn rfc6888_req_4_a_vm_leaves_ports_to_the_others() {
    let mut pool = pool(DEFAULT_RANGE);
    pool.share_among(3);
    let mut ports_of = |n, vm| std::iter::from_fn(|| pool.pick(to(n), vm, false, 0)).count();
    // A quarter of 4,536 is 1,134, a third of that 378.
    assert_eq!(ports_of(1, VmId::new(1)), 4_536 - 1_134);
    assert_eq!(ports_of(1, VmId::new(2)), 378);
    assert_eq!(ports_of(1, VmId::new(3)), 378);
    assert_eq!(ports_of(1, VmId::new(1)), 0);
    assert_eq!(
        ports_of(2, VmId::new(2)),
        4_536 - 1_134,
        "toward another destination"
    );
}

#[test]
fn resting_ports_are_of_a_vm_s_share() {
    let mut pool = pool(61_000..=61_079);
    pool.share_among(2);
    let first: Vec<u16> = std::iter::from_fn(|| pool.pick(to(1), VmId::new(1), false, 0)).collect();
    assert_eq!(first.len(), 60);
    for port in first {
        pool.free(to(1), port, VmId::new(1), Freed::Rests, 0);
    }
    assert_eq!(pool.pick(to(1), VmId::new(1), false, 0), None);
    assert!(pool.pick(to(1), VmId::new(2), false, 0).is_some());
    pool.wake(121 * SECOND_NS);
    assert!(pool.pick(to(1), VmId::new(1), false, 0).is_some());
}

#[test]
fn a_port_of_another_process_is_no_vm_s() {
    let mut pool = pool(61_000..=61_079);
    pool.share_among(2);
    for _ in 0..40 {
        let port = pool.pick(to(1), VmId::new(1), false, 0).unwrap();
        pool.free(to(1), port, VmId::new(1), Freed::Taken, 0);
    }
    // 40 are left. Past the common ones a VM has its ten, although the others were its tries.
    let first: Vec<u16> = std::iter::from_fn(|| pool.pick(to(1), VmId::new(1), false, 0)).collect();
    assert_eq!(first.len(), 20);
    pool.wake(121 * SECOND_NS);
    assert_eq!(pool.busy(&to(1)), 20);
}

#[test]
fn each_process_has_ports_that_the_others_leave_alone() {
    // Rows 0, 1 and 63 have a process each.
    let rows = [0, 1, 63];
    let owners = 1 | 1 << 1 | 1 << 63;
    let with_others = |own_row| {
        let mut pool = pool(DEFAULT_RANGE);
        pool.share_with(own_row, owners);
        pool
    };
    let mut common: HashSet<u16> = HashSet::new();
    for own_row in rows {
        let mut pool = with_others(own_row);
        let ports = std::iter::from_fn(|| pool.pick(to(1), VmId::new(7), false, 0));
        common = ports.collect();
        // A 64th of a quarter of 4,536 is 17.
        assert_eq!(common.len(), 4_536 - 3 * 17);
        assert_eq!(pool.pick_kept(to(1), VmId::new(7)), None, "it has more");
        pool.share_with(own_row, 1 << own_row);
        let rest = std::iter::from_fn(|| pool.pick(to(1), VmId::new(7), false, 0)).count();
        assert_eq!(rest, 3 * 17, "it is alone again");
    }
    for own_row in rows {
        let mut pool = with_others(own_row);
        pool.share_among(3);
        let mut kept = |vm| std::iter::from_fn(|| pool.pick_kept(to(1), vm)).collect::<Vec<_>>();
        for vm in 0..3 {
            let ports = kept(VmId::new(vm));
            assert_eq!(ports.len(), 5, "a third");
            assert!(ports.iter().all(|port| common.insert(*port)));
        }
    }
    // Alone nobody has less.
    assert_eq!(pool(DEFAULT_RANGE).pick_kept(to(1), VmId::new(7)), None);
}

#[test]
fn ports_whose_rest_ends_at_once_are_freed_some_at_a_time() {
    let mut pool = pool(DEFAULT_RANGE);
    let ports = PORTS_AT_ONCE * 2 + 100;
    for n in 0..ports {
        let to = to((n % 200) as u8);
        let port = pool.pick(to, VmId::new(1), false, 0).unwrap();
        pool.free(to, port, VmId::new(1), Freed::Rests, 0);
    }
    assert_eq!(pool.sizes().1, ports);
    let now = 121 * SECOND_NS;
    assert!(!pool.wake(now) && !pool.wake(now));
    assert_eq!(pool.sizes().1, 100);
    assert!(pool.wake(now));
    assert_eq!(pool.sizes(), (0, 0));
}

#[test]
fn memory_is_given_back() {
    let mut pool = pool(DEFAULT_RANGE);
    for n in 0..200 {
        let port = pool.pick(to(n), VmId::new(1), false, 0).unwrap();
        pool.free(to(n), port, VmId::new(1), Freed::Rests, 0);
    }
    pool.wake(121 * SECOND_NS);
    assert_eq!(pool.sizes(), (0, 0));
}

proptest! {
    /// No port is in use twice toward one destination, and none is lost, in any order of picking
    /// and freeing.
    #[test]
    fn rfc4787_req_3_no_port_is_out_twice(
        size in 1u16..200,
        steps in prop::collection::vec((0u8..3, any::<prop::sample::Index>(), 0u8..4), 1..600),
    ) {
        let mut pool = pool(61_000..=61_000 + (size - 1));
        let mut out: Vec<(u8, u16)> = Vec::new();
        let mut now = 0;
        for (n, which, action) in steps {
            now += SECOND_NS / 2;
            pool.wake(now);
            if action < 3 {
                if let Some(port) = pool.pick(to(n), VmId::new(1), action == 2, now) {
                    prop_assert!(!out.contains(&(n, port)));
                    out.push((n, port));
                }
            } else if !out.is_empty() {
                let (n, port) = out.swap_remove(which.index(out.len()));
                let how = if port % 2 == 0 { Freed::Safe } else { Freed::Rests };
                pool.free(to(n), port, VmId::new(1), how, now);
            }
        }
        now += 1_000 * SECOND_NS;
        pool.wake(now);
        for n in 0..3 {
            let held = out.iter().filter(|(m, _)| *m == n).count();
            prop_assert_eq!(pool.busy(&to(n)), held);
            let free = std::iter::from_fn(|| pool.pick(to(n), VmId::new(1), false, 0)).count();
            prop_assert_eq!(free + held, usize::from(size));
        }
    }

    /// A VM below its part of the reserve finds a port, whatever the others hold and free.
    #[test]
    fn rfc6888_req_4_every_vm_has_its_part(
        size in 8u16..300,
        vms in 2u32..6,
        steps in prop::collection::vec((0u32..6, any::<prop::sample::Index>(), 0u8..12), 1..900),
    ) {
        let mut pool = pool(61_000..=61_000 + (size - 1));
        pool.share_among(vms as usize);
        let part = usize::from(size) / 4 / vms as usize;
        let mut held: Vec<(u32, u16)> = Vec::new();
        for (vm, which, action) in steps {
            let vm = vm % vms;
            if action > 0 || held.is_empty() {
                held.extend(pool.pick(to(1), VmId::new(vm), false, 0).map(|port| (vm, port)));
            } else {
                let (vm, port) = held.swap_remove(which.index(held.len()));
                pool.free(to(1), port, VmId::new(vm), Freed::Safe, 0);
            }
            for vm in 0..vms {
                if held.iter().filter(|(v, _)| *v == vm).count() < part {
                    let port = pool.pick(to(1), VmId::new(vm), false, 0);
                    prop_assert!(port.is_some(), "VM {vm}, {} are held", held.len());
                    pool.free(to(1), port.unwrap_or_default(), VmId::new(vm), Freed::Safe, 0);
                }
            }
        }
    }

    /// Whether there is a port is known without taking one: of processes, VMs, and rests.
    #[test]
    fn what_is_said_to_be_had_is(
        size in 1u16..200,
        vms in 1u32..4,
        others in 0u64..8,
        reserved in prop::collection::vec(0u16..200, 0..3),
        steps in prop::collection::vec((0u32..4, any::<prop::sample::Index>(), 0u8..12), 1..600),
    ) {
        let mut pool = pool(61_000..=61_000 + (size - 1));
        pool.share_among(vms as usize);
        pool.share_with(0, others);
        pool.set_reserved(reserved.iter().map(|port| (Protocol::Tcp, 61_000 + port)));
        let mut held: Vec<(u32, u16)> = Vec::new();
        for (now, (vm, which, action)) in steps.into_iter().enumerate() {
            let (vm, now_ns) = (vm % vms, now as u64 * SECOND_NS);
            pool.wake(now_ns);
            if action < 6 || held.is_empty() {
                let timestamps = action == 0;
                let said = pool.has_port(to(1), VmId::new(vm), timestamps, now_ns, &[]);
                let port = pool.pick(to(1), VmId::new(vm), timestamps, now_ns);
                let port = port.or_else(|| pool.pick_kept(to(1), VmId::new(vm)));
                prop_assert_eq!(said, port.is_some());
                held.extend(port.map(|port| (vm, port)));
                continue;
            }
            let (vm, port) = held.swap_remove(which.index(held.len()));
            let how = match action {
                6 | 7 => Freed::Safe,
                8 => Freed::Rests,
                9 => Freed::GuestFirst,
                10 => Freed::HostWaits,
                _ => Freed::RestsForOthers,
            };
            pool.free(to(1), port, VmId::new(vm), how, now_ns);
        }
    }
}
