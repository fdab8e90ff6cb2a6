use super::*;

fn after(waits_ns: impl IntoIterator<Item = u64>) -> Looking {
    let mut looking = Looking::default();
    for waited_ns in waits_ns {
        // As `wait` does: a look is in vain if the event came behind it.
        let in_vain = looking.look_ns() > 0 && waited_ns > looking.look_ns();
        looking.waited(waited_ns, in_vain);
    }
    looking
}

#[test]
fn it_looks_while_events_are_near() {
    assert_eq!(after([]).look_ns(), 0);
    assert_eq!(after([10_000; 3]).look_ns(), 0);
    assert_eq!(after([10_000; 4]).look_ns(), LOOK_NS);
    assert_eq!(after([10_000; 1_000]).look_ns(), LOOK_NS);
}

#[test]
fn an_idle_guest_costs_no_look() {
    let dense = [10_000; 100];
    let idle = after(dense.into_iter().chain([FAR_NS]));
    assert_eq!(idle.look_ns(), 0, "one long sleep is enough");
    assert_eq!(after([200_000; 100]).look_ns(), 0);
}

#[test]
fn looks_in_vain_end() {
    let dense = [10_000; 100];
    let regular = dense.into_iter().chain([NEAR_NS + 1; 3]);
    assert_eq!(after(regular).look_ns(), 0, "three looks in vain");
    // Events that come just behind each look: at most one in three is looked for.
    let mut looking = after(dense);
    let mut looks = 0;
    for _ in 0..300 {
        let in_vain = looking.look_ns() > 0;
        looks += u32::from(in_vain);
        looking.waited(LOOK_NS + 1, in_vain);
    }
    assert!(looks <= 103, "{looks}");
}
