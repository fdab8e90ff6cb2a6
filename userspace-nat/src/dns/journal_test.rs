use super::{
    super::chain::tests::{a, answer, cname},
    *,
};
use slipgate_policy::wire;

#[test]
fn the_names_on_the_way_are_recorded_up_to_a_bound() {
    let asked = wire("www.shop.test").unwrap();
    let records = [
        cname("www.shop.test", 60, "shop.cdn.test"),
        cname("shop.cdn.test", 60, "e7.edge.test"),
        a("e7.edge.test", 60, [192, 0, 2, 1]),
        a("not.on.the.way.test", 60, [192, 0, 2, 2]),
    ];
    let told = answer("www.shop.test", &records);
    assert_eq!(
        chain(&told, Name(&asked)),
        ["shop.cdn.test", "e7.edge.test"]
    );

    // Octets that take four characters each: 16 such names would be 16 KiB of every line.
    let long = |last: u8| {
        let mut name = Vec::new();
        for _ in 0..3 {
            name.push(63);
            name.extend([last; 63]);
        }
        name.push(0);
        name
    };
    let mut message = answer("www.shop.test", &[]).message.to_vec();
    let mut owner = asked.to_vec();
    for step in 1..=16 {
        let to = long(step);
        message.extend(&owner);
        message.extend([0, 5, 0, 1, 0, 0, 0, 60]);
        message.extend((to.len() as u16).to_be_bytes());
        message.extend(&to);
        owner = to;
    }
    message[7] = 16;
    let told = Answer {
        message: message.into(),
        ..told
    };
    let names = chain(&told, Name(&asked));
    assert_eq!(names.len(), 2);
    assert!(names.iter().map(String::len).sum::<usize>() <= MOST_CHAIN);
}
