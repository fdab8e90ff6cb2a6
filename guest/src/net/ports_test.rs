use super::*;

#[test]
fn every_port_has_one_owner() {
    for cpus in [1, 2, 3, 32] {
        for cpu in 0..cpus {
            let range = range(cpu, cpus);
            assert!(range.len() > 1000, "{cpus}");
            assert!(range.clone().all(|port| owner(port, cpus) == cpu));
            assert_eq!(
                range.start,
                FIRST + cpu as u16 * range.len() as u16,
                "no overlap"
            );
        }
        assert_eq!((owner(68, cpus), owner(u16::MAX, cpus)), (0, cpus - 1));
    }
}

#[test]
fn a_port_rests() {
    let mut ports = Ports::new(31, 32, 60_000);
    let count = range(31, 32).len();
    let mut all: alloc::vec::Vec<u16> = (0..count).map_while(|_| ports.take(0)).collect();
    assert_eq!(ports.take(u64::MAX - 1), None, "all are in use");
    ports.give_back(all[5], 1000);
    ports.give_back(all[3], 500);
    ports.give_back(1, 0);
    assert_eq!(ports.take(499), None);
    assert_eq!(ports.take(999), Some(all[3]));
    assert_eq!(ports.take(1000), Some(all[5]));
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count);
}

#[test]
fn a_port_that_came_back_is_the_last_to_be_used_again() {
    let mut ports = Ports::new(0, 32, 7);
    let first = ports.take(0).unwrap();
    ports.give_back(first, 0);
    let count = range(0, 32).len();
    for _ in 1..count {
        let next = ports.take(0).unwrap();
        assert_ne!(next, first);
        ports.give_back(next, 0);
    }
    assert_eq!(ports.take(0), Some(first));
}
