use super::*;

fn id(number: u32) -> VmId {
    VmId::new(number)
}

#[test]
fn each_vm_gets_one_soon_and_then_one_an_hour() {
    let mut schedule = Schedule::default();
    assert_eq!(schedule.next_deadline_ns(), None);
    for number in 1..=1_000 {
        schedule.add(id(number), 0);
    }
    let mut times: HashMap<VmId, Vec<u64>> = HashMap::new();
    let mut most_in_a_second = HashMap::<u64, u32>::new();
    while let Some(now) = schedule
        .next_deadline_ns()
        .filter(|at| *at < 3 * LONGEST_NS)
    {
        let vm = schedule.take(now).expect("one is due");
        times.entry(vm).or_default().push(now);
        if now > FIRST_WITHIN_NS {
            *most_in_a_second.entry(now / SECOND_NS).or_default() += 1;
        }
    }
    assert_eq!(times.len(), 1_000);
    for of_one in times.values() {
        assert!(of_one[0] < FIRST_WITHIN_NS);
        let waits = of_one.windows(2).map(|pair| pair[1] - pair[0]);
        for wait in waits {
            assert!((LONGEST_NS / 2..=LONGEST_NS).contains(&wait), "{wait}");
        }
        assert!((3..=6).contains(&of_one.len()), "{}", of_one.len());
    }
    let most = most_in_a_second.values().max().unwrap();
    assert!(*most < 12, "they are spread: {most} in a second");
}

#[test]
fn a_vm_is_in_it_once_and_can_leave() {
    let mut schedule = Schedule::default();
    schedule.add(id(1), 0);
    schedule.add(id(1), 5);
    assert!(schedule.has(id(1)));
    let at = schedule.next_deadline_ns().unwrap();
    assert_eq!(schedule.take(at - 1), None, "not before its time");
    assert_eq!(schedule.take(at), Some(id(1)));
    assert_eq!(schedule.take(at), None);
    schedule.add(id(1), at);
    assert!(
        schedule.next_deadline_ns().unwrap() > at + LONGEST_NS / 2 - 1,
        "not once more"
    );
    schedule.remove(id(1));
    schedule.remove(id(2));
    assert_eq!(
        (schedule.next_deadline_ns(), schedule.has(id(1))),
        (None, false)
    );
}
