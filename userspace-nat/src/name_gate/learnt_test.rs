use std::net::Ipv4Addr;

use super::*;
use slipgate_abi::VmId;

fn name(text: &str, rules: &[u32]) -> Rc<LearntName> {
    Rc::new(LearntName {
        name: text.into(),
        rules: rules
            .iter()
            .map(|&order| PatternRef { order, line: 0 })
            .collect(),
        chain: text.as_bytes().into(),
    })
}

fn at(n: u32) -> IpAddr {
    Ipv4Addr::from_bits(0xc000_0200 + n).into()
}

/// Rules are as they are written.
const EQUAL: Alike<'_> = Alike::Rules(&|a, b| a == b);

impl Learnt {
    /// Opens addresses for these times, seconds.
    fn tell(
        &mut self,
        vm: VmId,
        name: &Rc<LearntName>,
        addresses: &[(IpAddr, u32)],
        alike: Alike<'_>,
        now_ns: u64,
    ) -> Result<(), Full> {
        let until = |(address, ttl_s): &(IpAddr, u32)| {
            let until_ns = now_ns + u64::from(*ttl_s) * SECOND_NS;
            (*address, until_ns)
        };
        let until = addresses.iter().map(until).collect();
        self.open(vm, (name, 0), &until, alike, now_ns)
    }
}

fn names(learnt: &Learnt, vm: VmId, address: IpAddr, now_ns: u64) -> Vec<String> {
    let names = learnt.effects(vm, address, now_ns);
    names.map(|name| name.name.to_string()).collect()
}

#[test]
fn an_opening_is_one_vms_and_lasts_for_its_time() {
    let mut learnt = Learnt::default();
    let open = [(at(0), 30), (at(1), 100)];
    learnt
        .tell(VmId::new(1), &name("a", &[0]), &open, EQUAL, 0)
        .unwrap();
    for (address, lasts_s) in open {
        let end_ns = u64::from(lasts_s) * SECOND_NS;
        assert_eq!(names(&learnt, VmId::new(1), address, end_ns - 1), ["a"]);
        assert_eq!(names(&learnt, VmId::new(1), address, end_ns), [""; 0]);
    }
    assert_eq!(
        names(&learnt, VmId::new(2), at(1), 1),
        [""; 0],
        "another VM's"
    );
}

/// A successor reads the time that was noted last.
#[test]
fn many_small_extensions_are_noted_once_they_are_a_second_together() {
    let (vm, mut learnt) = (VmId::new(1), Learnt::default());
    let (a, b) = (name("a", &[0]), name("b", &[0]));
    let mut noted_ns = 0;
    let mut notes = 0;
    for tenth in 0..=100 {
        let now_ns = tenth * SECOND_NS / 10;
        learnt.tell(vm, &a, &[(at(0), 60)], EQUAL, now_ns).unwrap();
        // Stands beside it until it is told again.
        learnt.tell(vm, &b, &[(at(0), 40)], EQUAL, now_ns).unwrap();
        for change in learnt.take_changes() {
            match change {
                Change::Opened(_, _, of, until_ns) if of == a => {
                    noted_ns = until_ns;
                    notes += 1;
                }
                Change::Ended(_, _, of) => assert_eq!(of, b),
                Change::Opened(..) => {}
            }
        }
        let until_ns = now_ns + 60 * SECOND_NS;
        assert!(noted_ns + SECOND_NS > until_ns, "{tenth}: {noted_ns}");
    }
    assert_eq!(notes, 11, "one a second");
}

/// A flow that begins then is judged, at a reload, by a name that had the address open.
#[test]
fn a_name_whose_own_time_is_over_does_not_stand_for_one_that_lasts() {
    let (vm, mut learnt) = (VmId::new(1), Learnt::default());
    for (text, ttl_s) in [("a", 1_000), ("b", 40)] {
        learnt
            .tell(vm, &name(text, &[0]), &[(at(0), ttl_s)], EQUAL, 0)
            .unwrap();
    }
    let by_name = |name: &str, at_s: u64| {
        let found = learnt.by_name(vm, at(0), name, at_s * SECOND_NS);
        found.is_some()
    };
    let is_open = |name: &str, at_s: u64| !learnt.addresses(vm, name, at_s * SECOND_NS).is_empty();
    assert_eq!((is_open("a", 39), is_open("b", 39)), (true, true));
    assert_eq!((is_open("a", 41), is_open("b", 41)), (true, false));
    assert_eq!(names(&learnt, vm, at(0), 39 * SECOND_NS), ["b"]);
    assert!(by_name("b", 39));
    assert_eq!(names(&learnt, vm, at(0), 41 * SECOND_NS), ["a"]);
    assert!(!by_name("b", 41));
    assert_eq!(names(&learnt, vm, at(0), 1_001 * SECOND_NS), [""; 0]);
}

#[test]
fn an_answer_with_less_ttl_does_not_shorten_what_is_open() {
    let mut learnt = Learnt::default();
    learnt
        .tell(VmId::new(1), &name("a", &[0]), &[(at(0), 1_000)], EQUAL, 0)
        .unwrap();
    learnt
        .tell(VmId::new(1), &name("b", &[0]), &[(at(0), 10)], EQUAL, 0)
        .unwrap();
    assert_eq!(
        names(&learnt, VmId::new(1), at(0), 999 * SECOND_NS),
        ["a"],
        "the one that still lasts"
    );
    assert_eq!(learnt.count(VmId::new(1)), 1);
    learnt
        .tell(VmId::new(1), &name("c", &[1]), &[(at(0), 10)], EQUAL, 0)
        .unwrap();
    assert_eq!(
        names(&learnt, VmId::new(1), at(0), 1),
        ["b", "c"],
        "other rules stand beside"
    );
    assert_eq!(learnt.addresses(VmId::new(1), "c", 1), [at(0)]);
}

/// The names of an address that a VM had until now, each with the seconds that it lasts.
fn forgotten(learnt: &mut Learnt) -> Vec<(String, u64)> {
    let of_vm = &learnt.vms[&VmId::new(1)];
    let openings = of_vm.by_address.values().flat_map(|all| all.0.clone());
    let had = openings.flat_map(Opening::names);
    let had = had.map(|told| (told.name.name.to_string(), told.until_ns / SECOND_NS));
    let had = had.collect();
    learnt.forget(VmId::new(1));
    had
}

#[test]
fn names_of_one_opening_have_each_their_own_time() {
    let mut learnt = Learnt::default();
    let tell = |learnt: &mut Learnt, text: &str, ttl_s| {
        let (vm, name) = (VmId::new(1), name(text, &[0]));
        learnt.tell(vm, &name, &[(at(0), ttl_s)], EQUAL, 0).unwrap();
    };
    let had = |name: &str, lasts_s: u64| (name.to_owned(), lasts_s);
    for (told, left) in [
        (
            &[("a", 1_000), ("b", 40)][..],
            &[had("a", 1_000), had("b", 40)][..],
        ),
        (&[("a", 40), ("b", 1_000)], &[had("b", 1_000)]),
        // The longest is kept beside the last.
        (
            &[("a", 500), ("b", 1_000), ("c", 40)],
            &[had("b", 1_000), had("c", 40)],
        ),
        (
            &[("a", 1_000), ("b", 500), ("c", 40)],
            &[had("a", 1_000), had("c", 40)],
        ),
        // One that is told again keeps what it had.
        (&[("a", 1_000), ("b", 40), ("a", 50)], &[had("a", 1_000)]),
        (
            &[("a", 1_000), ("b", 60), ("b", 50)],
            &[had("a", 1_000), had("b", 60)],
        ),
        (&[("a", 1_000), ("b", 60), ("b", 2_000)], &[had("b", 2_000)]),
    ] {
        for (text, ttl_s) in told {
            tell(&mut learnt, text, *ttl_s);
        }
        let (vm, names) = (VmId::new(1), left.len());
        assert_eq!(learnt.count(vm), 1, "{told:?}");
        assert_eq!((learnt.names(vm), learnt.total()), (names, names));
        assert_eq!(learnt.vms[&vm].weight, names);
        assert_eq!(forgotten(&mut learnt), left, "{told:?}");
        assert_eq!(learnt.total(), 0);
        // What a successor knows in the end is nothing; each name was opened and ended.
        let mut known = Vec::new();
        for change in learnt.take_changes() {
            match change {
                Change::Opened(_, _, name, _) if !known.contains(&name) => known.push(name),
                Change::Opened(..) => {}
                Change::Ended(_, _, name) => {
                    assert!(known.contains(&name), "{told:?}: {name:?}");
                    known.retain(|other| *other != name);
                }
            }
        }
        assert!(known.is_empty(), "{told:?}: {known:?}");
    }
}

#[test]
fn what_is_full_refuses_the_new_and_makes_room_only_by_time() {
    let mut learnt = Learnt::default();
    let all: Vec<_> = (0..MAX_PER_VM as u32).map(|n| (at(n), 100)).collect();
    learnt
        .tell(VmId::new(1), &name("a", &[0]), &all, EQUAL, 0)
        .unwrap();
    let more = [(at(5), 100), (at(MAX_PER_VM as u32), 100)];
    let refused = learnt.tell(VmId::new(1), &name("a", &[0]), &more, EQUAL, 1);
    assert_eq!(refused, Err(Full));
    assert_eq!(learnt.count(VmId::new(1)), MAX_PER_VM);
    assert_eq!(
        names(&learnt, VmId::new(1), at(7), 1),
        ["a"],
        "what lives stays"
    );
    learnt
        .tell(VmId::new(1), &name("a", &[0]), &more[..1], EQUAL, 1)
        .unwrap();
    learnt
        .tell(VmId::new(2), &name("a", &[0]), &more, EQUAL, 1)
        .unwrap();
    learnt
        .tell(
            VmId::new(1),
            &name("a", &[0]),
            &more,
            EQUAL,
            100 * SECOND_NS,
        )
        .unwrap();
    assert_eq!(learnt.count(VmId::new(1)), 2, "the rest is over");
    learnt.forget(VmId::new(1));
    assert_eq!(
        (learnt.count(VmId::new(1)), learnt.count(VmId::new(2))),
        (0, 2)
    );
}

#[test]
fn of_many_names_at_an_address_one_stands_for_those_with_its_rules() {
    // As where connections are inspected.
    let mut learnt = Learnt::default();
    let mut tell = |text: &str, rules: &[u32], ttl_s, now_ns| {
        let name = name(text, rules);
        learnt
            .tell(
                VmId::new(1),
                &name,
                &[(at(0), ttl_s)],
                Alike::Itself,
                now_ns,
            )
            .unwrap();
    };
    for n in 0..100 {
        tell(&format!("n{n}"), &[n % 2, 7], 100 + n, 0);
    }
    tell("n7", &[1, 7], 500, 1);
    tell("n7", &[3], 50, 1);
    assert_eq!((learnt.count(VmId::new(1)), learnt.total()), (101, 101));
    assert_eq!(
        names(&learnt, VmId::new(1), at(0), 1).len(),
        3,
        "a list of rules each"
    );
    for n in 0..100_u32 {
        let name = format!("n{n}");
        let told = |now_ns| learnt.by_name(VmId::new(1), at(0), &name, now_ns).is_some();
        let lasts_s = if n == 7 { 500 } else { 100 + n };
        assert!(told(u64::from(lasts_s) * SECOND_NS - 1), "{name}");
        assert!(!told(u64::from(lasts_s) * SECOND_NS + 1), "{name}");
    }
    assert!(learnt.by_name(VmId::new(1), at(0), "n100", 1).is_none());
    assert!(learnt.by_name(VmId::new(1), at(1), "n7", 1).is_none());
    assert!(learnt.by_name(VmId::new(2), at(0), "n7", 1).is_none());
    learnt.take_changes();
    learnt.expire(150 * SECOND_NS);
    let ended = learnt.take_changes();
    assert!(
        ended
            .iter()
            .all(|change| matches!(change, Change::Ended(vm, ..) if vm.get() == 1))
    );
    // Those of 100 to 150 s but n7, and the one of 50.
    assert_eq!(
        (ended.len(), learnt.count(VmId::new(1)), learnt.total()),
        (51, 50, 50)
    );
    assert_eq!(
        names(&learnt, VmId::new(1), at(0), 199 * SECOND_NS),
        ["n7"],
        "which lasts longest"
    );
    learnt.expire(501 * SECOND_NS);
    assert_eq!((learnt.count(VmId::new(1)), learnt.total()), (0, 0));
}

#[test]
fn what_leads_through_long_names_counts_as_several() {
    let mut learnt = Learnt::default();
    let long = |text: &str, octets| {
        Rc::new(LearntName {
            name: text.into(),
            rules: Box::new([]),
            chain: vec![b'x'; octets].into(),
        })
    };
    // Three each.
    let fit = MAX_PER_VM as u32 / 3;
    let all: Vec<_> = (0..fit).map(|n| (at(n), 100)).collect();
    let mut open = |name: &Rc<LearntName>, addresses: &[(IpAddr, u32)], now_ns| {
        learnt.tell(VmId::new(1), name, addresses, EQUAL, now_ns)
    };
    open(&long("a", 2 * CHAIN_OCTETS), &all, 0).unwrap();
    assert_eq!(
        open(&long("a", CHAIN_OCTETS), &[(at(fit), 100)], 1),
        Err(Full)
    );
    open(&long("a", 9), &[(at(fit), 100)], 1).unwrap();
    let longer = long("b", 4 * CHAIN_OCTETS);
    assert_eq!(open(&longer, &all[..1], 1), Err(Full), "in its place");
    open(&long("b", 9), &all[..2], 1).unwrap();
    open(&longer, &all[..1], 1).unwrap();
    learnt.expire(101 * SECOND_NS);
    assert_eq!((learnt.count(VmId::new(1)), learnt.total()), (0, 0));
    learnt
        .tell(VmId::new(1), &longer, &all[..1], EQUAL, 101 * SECOND_NS)
        .unwrap();
    assert_eq!(learnt.vms[&VmId::new(1)].weight, 5);
}

impl Learnt {
    /// Returns the VMs that have openings.
    pub(in crate::name_gate) fn vms(&self) -> Vec<VmId> {
        self.vms.keys().copied().collect()
    }
}
