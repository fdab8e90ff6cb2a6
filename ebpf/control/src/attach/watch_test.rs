use super::*;
use crate::{
    attach::{Hook, Program},
    testing::{datapath, in_netns, make_tap, run},
};

#[test]
fn others_filters_are_noticed_and_ours_are_not() {
    in_netns("others_filters_are_noticed_and_ours_are_not", || {
        let (datapath, tap, other) = (datapath(), make_tap("t0"), make_tap("t1"));
        let watch = FilterWatch::open().unwrap();
        datapath
            .attach(Program::GuestEgress, tap, Hook::Clsact)
            .unwrap();
        assert_eq!(watch.take().unwrap(), BTreeSet::new());
        let theirs = datapath.paths().pin("engine_port").display().to_string();
        run(&format!(
            "tc filter add dev t0 ingress pref 7 bpf da pinned {theirs}"
        ));
        assert_eq!(watch.take().unwrap(), BTreeSet::from([tap]));
        run("tc filter del dev t0 ingress pref 7");
        assert_eq!(watch.take().unwrap(), BTreeSet::from([tap]));
        // Another kind of qdisc is nobody's concern here.
        run("tc qdisc add dev t1 root pfifo");
        run("tc qdisc del dev t1 root");
        assert_eq!(watch.take().unwrap(), BTreeSet::new());
        run("tc qdisc add dev t1 clsact");
        run("tc qdisc del dev t1 clsact");
        run("tc qdisc del dev t0 clsact");
        assert_eq!(watch.take().unwrap(), BTreeSet::from([tap, other]));
    });
}
