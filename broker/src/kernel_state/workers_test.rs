use super::fewest;

#[test]
fn a_new_vm_goes_to_the_first_worker_with_the_fewest() {
    let mut counts = [0; 3];
    let mut chosen = Vec::new();
    for _ in 0..4 {
        let at = fewest(counts.into_iter());
        counts[at] += 1;
        chosen.push(at);
    }
    assert_eq!(chosen, [0, 1, 2, 0]);
    assert_eq!(fewest([2, 1, 1].into_iter()), 1);
}
