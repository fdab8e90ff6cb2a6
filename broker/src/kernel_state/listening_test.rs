use std::io;

use super::*;

/// Groups of a kernel that refuses for now.
#[derive(Debug, Default)]
struct Fake {
    refuses: bool,
    tries: u32,
    joined: Vec<(IfIndex, Ipv6Addr)>,
}

impl Groups for Fake {
    fn join(&mut self, link: IfIndex, address: Ipv6Addr) -> slipgate_control::Result<()> {
        self.tries += 1;
        if self.refuses {
            let (what, answer) = ("join a group".into(), io::ErrorKind::OutOfMemory.into());
            return Err(slipgate_control::Error::Os { what, answer });
        }
        self.joined.push((link, address));
        Ok(())
    }

    fn leave(&mut self, link: IfIndex, address: Ipv6Addr) {
        let at = self.joined.iter().position(|it| *it == (link, address));
        self.joined.remove(at.expect("it was joined"));
    }
}

fn refusing() -> Listening<Fake> {
    let mut listening = Listening::<Fake>::default();
    listening.groups.refuses = true;
    listening
}

fn at(vm: u32) -> (IfIndex, Ipv6Addr) {
    (IfIndex::new(2), Ipv6Addr::from_bits(u128::from(vm)))
}

#[test]
fn what_is_refused_is_tried_again_at_each_look_until_it_is_joined() {
    let mut listening = refusing();
    let vm = VmId::new(1);
    listening.follow(vm, Some(at(1)));
    // Who asks for the same is told by the next look, not at once.
    listening.follow(vm, Some(at(1)));
    assert_eq!((listening.groups.tries, listening.refused()), (1, 1));
    listening.try_again();
    listening.try_again();
    assert_eq!((listening.groups.tries, listening.refused()), (3, 1));
    listening.groups.refuses = false;
    listening.try_again();
    assert_eq!(
        (listening.groups.joined.clone(), listening.refused()),
        (vec![at(1)], 0)
    );
    listening.try_again();
    listening.follow(vm, Some(at(1)));
    assert_eq!(listening.groups.tries, 4);
    listening.follow(vm, None);
    assert_eq!(listening.groups.joined, []);
}

#[test]
fn what_is_not_wanted_any_more_is_not_tried_again() {
    let mut listening = refusing();
    let vm = VmId::new(1);
    listening.follow(vm, Some(at(1)));
    listening.follow(vm, Some(at(2)));
    listening.groups.refuses = false;
    listening.try_again();
    assert_eq!(listening.groups.joined, [at(2)]);
    listening.groups.refuses = true;
    listening.follow(vm, Some(at(3)));
    listening.follow(vm, None);
    listening.groups.refuses = false;
    listening.try_again();
    assert_eq!(listening.groups.joined, []);
}

#[test]
fn a_look_tries_some_and_the_next_look_others() {
    let mut listening = refusing();
    let most = RETRIED_AT_ONCE as u32;
    for vm in 1..=most + 10 {
        listening.follow(VmId::new(vm), Some(at(vm)));
    }
    assert_eq!(listening.groups.tries, most + 10);
    listening.try_again();
    assert_eq!(listening.groups.tries, 2 * most + 10);
    listening.groups.refuses = false;
    listening.try_again();
    let first = most + 1;
    let joined: Vec<_> = (first..=most + 10).map(at).collect();
    assert_eq!(listening.groups.joined, joined);
    listening.try_again();
    assert_eq!(
        (listening.groups.joined.len() as u32, listening.refused()),
        (most + 10, 0)
    );
}
