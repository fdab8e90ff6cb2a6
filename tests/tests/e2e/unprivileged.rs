//! A user without any privilege, in a world.

use std::{
    path::PathBuf,
    process::{Command, Output},
};

use slipgate_testbed::{OrdinaryUser, World};

/// A world, and a place in it where the user has this executable, besides what is theirs anyway.
pub(super) struct Place {
    pub(super) world: World,
    pub(super) user: OrdinaryUser,
}

impl Place {
    pub(super) fn new() -> Self {
        let user = OrdinaryUser::new().unwrap();
        let here = std::env::current_exe().unwrap();
        user.install(&here, "tests").unwrap();
        Self {
            world: World::new().unwrap(),
            user,
        }
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.user.file(name)
    }

    pub(super) fn slipgate(&self, args: &[&str]) -> Command {
        self.user.slipgate(args)
    }

    pub(super) fn output(&self, args: &[&str]) -> String {
        let output: Output = self.user.run(&self.world.host, args).unwrap();
        String::from_utf8(output.stdout).unwrap()
    }
}
