//! The BPF programs, run one packet at a time (`BPF_PROG_TEST_RUN`) and between real devices.
//!
//! Needs root. Without it each test says `skipped: <test>: <why>`.

mod activity;
mod address;
mod close;
mod cost;
mod datapath;
mod devices;
mod early;
mod engine;
mod expect;
mod first_packets;
mod flow;
mod flow6;
mod frame;
mod frame6;
mod freeze;
mod guard;
mod guest6;
mod handed;
mod held;
mod hit;
mod hit6;
mod liar;
mod mapped;
mod neighbour6;
mod pool;
mod random;
mod rate;
mod refused;
mod routed6;
mod single6;
#[path = "../../src/skipped_test.rs"]
mod skipped;
mod stale;
mod uncommon;
mod ways;
mod wire;
mod world;
mod world6;

/// Makes the datapath, or prints that the test is skipped and returns from it.
macro_rules! loaded {
    () => {
        match crate::pool::Datapath::for_test(crate::test_name!()) {
            Some(datapath) => datapath,
            None => return,
        }
    };
}
pub(crate) use loaded;

/// Path of the enclosing test.
macro_rules! test_name {
    () => {{
        fn here() {}
        std::any::type_name_of_val(&here).trim_end_matches("::here")
    }};
}
pub(crate) use test_name;
