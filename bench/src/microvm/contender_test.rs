use std::{collections::BTreeSet, env};

use super::*;

#[test]
fn each_contender_has_a_name_of_its_own() {
    let names: BTreeSet<_> = ALL.into_iter().map(Contender::name).collect();
    assert_eq!(names.len(), ALL.len());
}

#[test]
fn a_vmm_takes_part_where_its_binary_is_named() {
    for one in ALL {
        let Contender::Other(vmm, ..) = one else {
            continue;
        };
        match (env::var_os(vmm.variable()), one.version()) {
            (None, absent) => {
                let why = absent.unwrap_err().to_string();
                assert!(why.contains(vmm.variable()), "{why}");
            }
            (Some(_), version) => assert!(version.unwrap().contains("TAP"), "{one:?}"),
        }
    }
}
