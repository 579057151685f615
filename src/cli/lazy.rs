//! Options that are built when their verb is asked for, and not before: a call names one verb, and the options of all the
//! others would cost more than what it does. The derived `defer` does the same, and loses what is said about the verb.

use std::ops::Deref;

use clap::builder::Resettable;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches};

/// The options `T` of one verb.
#[derive(Clone, Copy, Debug)]
pub struct Lazy<T>(T);

impl<T> Deref for Lazy<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Args> Args for Lazy<T> {
    fn augment_args(verb: Command) -> Command {
        verb.defer(build::<T>)
    }

    fn augment_args_for_update(verb: Command) -> Command {
        T::augment_args_for_update(verb)
    }
}

/// Adds the options to their verb. What the type's own documentation says is not for users.
fn build<T: Args>(verb: Command) -> Command {
    let about = Resettable::from(verb.get_about().cloned());
    let long_about = Resettable::from(verb.get_long_about().cloned());
    T::augment_args(verb).about(about).long_about(long_about)
}

impl<T: FromArgMatches> FromArgMatches for Lazy<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches(matches).map(Self)
    }

    fn from_arg_matches_mut(matches: &mut ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches_mut(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches(matches)
    }
}
