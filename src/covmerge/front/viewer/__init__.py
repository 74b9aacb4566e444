"""A page on this machine on which experts are weighed; it shows at once what each retains.

job     measures base, experts and a merged model once
scene   the data that the page gets of them
choice  weights as they are chosen on the page, and the recipe that they are
server  the page on loopback, for whoever knows its address
page    the page itself: what a browser gets, as it is
"""

from covmerge.front.viewer.job import ViewJob
from covmerge.front.viewer.scene import Choice, Group, Scene, choice_of, recipe_of
from covmerge.front.viewer.server import Server

__all__ = ["Choice", "Group", "Scene", "Server", "ViewJob", "choice_of", "recipe_of"]
